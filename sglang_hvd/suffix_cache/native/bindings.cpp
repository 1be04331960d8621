// The Python face of the native core. Conversions only: the algorithms are in the headers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>

#include "accepted_lengths.hpp"
#include "cache_bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// `const` takes read-only arrays too. Every argument is also bound with noconvert(), without which
// an int64 array would be copied to int32 silently.
template <typename T, typename Shape>
using Array = nb::ndarray<const T, Shape, nb::c_contig, nb::device::cpu>;
template <typename T>
using Vector = Array<T, nb::ndim<1>>;
template <typename T>
using Matrix = Array<T, nb::ndim<2>>;
using Int32Result = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>;

template <typename ArrayType>
auto span_of(const ArrayType& array) {
    return std::span(array.data(), array.size());
}

Int32Result accepted_lengths(const Matrix<std::int32_t>& draft_tokens,
                             const Vector<std::int32_t>& draft_lengths,
                             const Vector<std::int64_t>& positions,
                             const Vector<std::int32_t>& sequence) {
    const std::size_t num_drafts = draft_tokens.shape(0);
    auto accepted = std::make_unique<std::int32_t[]>(num_drafts);
    {
        nb::gil_scoped_release nogil;
        sglang_hvd::accepted_lengths(
            {span_of(draft_tokens), span_of(draft_lengths), draft_tokens.shape(1)},
            span_of(positions), span_of(sequence), {accepted.get(), num_drafts});
    }
    nb::capsule owner(accepted.get(),
                      [](void* data) noexcept { delete[] static_cast<std::int32_t*>(data); });
    return Int32Result(accepted.release(), {num_drafts}, owner);
}

}  // namespace

NB_MODULE(_native, m) {
    sglang_hvd::bind_cache(m);
    m.def("accepted_lengths", &accepted_lengths, "draft_tokens"_a.noconvert(),
          "draft_lengths"_a.noconvert(), "positions"_a.noconvert(), "sequence"_a.noconvert(),
          R"(Number of leading tokens of each draft that equal the recorded continuation.

draft_tokens   int32[num_drafts, width], C-contiguous, row i padded after draft_lengths[i]
draft_lengths  int32[num_drafts], 0..width
positions      int64[num_drafts], 0..len(sequence): where draft i would start
sequence       int32[num_tokens]: the recorded prompt and output

Returns int32[num_drafts], the bonus token not counted: the replay label of the paper, Appendix B.
Raises TypeError for another dtype or shape (nothing is converted), ValueError for a value out of
range. The GIL is released.)");
}
