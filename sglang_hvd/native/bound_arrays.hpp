// The array types that the bindings of all packages accept, and how they refuse arguments. An array of another
// dtype, shape or layout is refused and never converted. No file of an algorithm includes this.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "draft_layout.hpp"

namespace sglang_hvd {

// A C-contiguous array on the CPU. Arguments of one dimension may be spans instead.
template <typename T, int kDims>
class Output
    : public nanobind::ndarray<T, nanobind::ndim<kDims>, nanobind::c_contig, nanobind::device::cpu> {
public:
    // The values of one row, all of its dimensions.
    std::span<T> row(std::size_t i) const {
        std::size_t num = 1;
        for (std::size_t dim = 1; dim < kDims; ++dim) num *= this->shape(dim);
        return {this->data() + i * num, num};
    }
};
template <typename T, int kDims>
using Input = Output<const T, kDims>;

inline void require(bool is_true, const char* message) {
    if (!is_true) throw std::invalid_argument(message);
}

// An array of a DraftBatch (types.py). num_rows: rows that are used. num_columns: of a matrix; 0: any number.
template <typename T, int kDims, std::size_t kLength>
Output<T, kDims> array_of(nanobind::handle batch, const char (&name)[kLength], std::size_t num_rows,
                          std::size_t num_columns = 0) {
    const nanobind::object value = batch.attr(name);  // may raise, which try_cast may not
    Output<T, kDims> array;
    if (!nanobind::try_cast(value, array, false))
        throw nanobind::type_error((std::string(name) + " has another dtype, layout or number of dimensions").c_str());
    require(array.shape(0) >= num_rows,
            "the arrays do not fit: the batch has fewer rows than there are requests, make a larger one");
    require(num_columns == 0 || array.shape(1) == num_columns,
            "the arrays of the batch do not fit each other: they have different widths");
    return array;
}

// The arrays that DraftRows and TreeRows have in common.
template <typename Rows>
Rows nodes_of(nanobind::handle batch, std::size_t num_rows) {
    Rows rows;
    const auto token_ids = array_of<std::int32_t, 2>(batch, "token_ids", num_rows);
    rows.width = token_ids.shape(1);
    rows.token_ids = token_ids.data();
    rows.parents = array_of<std::int32_t, 2>(batch, "parents", num_rows, rows.width).data();
    rows.depths = array_of<std::int32_t, 2>(batch, "depths", num_rows, rows.width).data();
    rows.probs = array_of<float, 2>(batch, "probs", num_rows, rows.width).data();
    rows.num_nodes = array_of<std::int32_t, 1>(batch, "num_nodes", num_rows).data();
    return rows;
}

// All arrays of a DraftBatch. They live as long as the batch.
inline DraftRows rows_of(nanobind::handle batch, std::size_t num_rows) {
    auto rows = nodes_of<DraftRows>(batch, num_rows);
    rows.matches = array_of<float, 2>(batch, "matches", num_rows, kMatchColumns).data();
    rows.evidence = array_of<float, 2>(batch, "evidence", num_rows, kEvidenceColumns).data();
    return rows;
}

inline void require_lengths(const DraftRows& rows, std::size_t num_rows) {
    for (std::size_t i = 0; i < num_rows; ++i)
        require(rows.num_nodes[i] >= 0 && rows.length(i) <= rows.width, "a draft is longer than its row");
}

}  // namespace sglang_hvd

namespace nanobind::detail {

template <typename T, int kDims>
struct type_caster<sglang_hvd::Output<T, kDims>> {
    using Array = ndarray<T, ndim<kDims>, c_contig, device::cpu>;
    using Bound = sglang_hvd::Output<T, kDims>;
    NB_TYPE_CASTER(Bound, make_caster<Array>::Name)

    bool from_python(handle src, std::uint32_t flags, cleanup_list* cleanup) noexcept {
        make_caster<Array> caster;
        if (!caster.from_python(src, flags & ~std::uint32_t{cast_flags::convert}, cleanup)) return false;
        static_cast<Array&>(value) = std::move(caster.value);
        return true;
    }
};

// The caller's argument outlives the call, and so do its values.
template <typename T>
struct type_caster<std::span<T>> {
    using Array = sglang_hvd::Output<T, 1>;
    NB_TYPE_CASTER(std::span<T>, make_caster<Array>::Name)

    bool from_python(handle src, std::uint32_t flags, cleanup_list* cleanup) noexcept {
        make_caster<Array> caster;
        if (!caster.from_python(src, flags, cleanup)) return false;
        value = {caster.value.data(), caster.value.size()};
        return true;
    }
};

}  // namespace nanobind::detail
