// The Python bindings of the engine: conversions and checks of shapes only.
#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "bound_arrays.hpp"
#include "missing_places.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace sglang_hvd {
namespace {

using Ints = MissingPlaces::Ints;
using Array = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;

Array owning_array(std::vector<std::int64_t> values) {
    auto* const held = new std::vector<std::int64_t>(std::move(values));
    const nb::capsule owner(held, [](void* of) noexcept { delete static_cast<std::vector<std::int64_t>*>(of); });
    return Array(held->data(), {held->size()}, owner);
}

void require_lengths(Ints slots, Ints cached_lens) {
    require(slots.size() == cached_lens.size(), "keep and settle need one length for each slot");
}

}  // namespace

void bind_engine(nb::module_& m) {
    nb::class_<MissingPlaces>(m, "MissingPlaces", "See missing_places.hpp.")
        .def(nb::init<>())
        .def("keep",
             [](MissingPlaces& self, Ints slots, Ints cached_lens, std::int64_t width) {
                 require_lengths(slots, cached_lens);
                 self.keep(slots, cached_lens, width);
             })
        .def("settle",
             [](MissingPlaces& self, Ints slots, Ints cached_lens) {
                 require_lengths(slots, cached_lens);
                 auto [found, nodes] = self.settle(slots, cached_lens);
                 found.insert(found.end(), nodes.begin(), nodes.end());
                 return owning_array(std::move(found));
             })
        .def("forget", &MissingPlaces::forget)
        .def("take", [](MissingPlaces& self, Ints slots) { return owning_array(self.take(slots)); })
        .def("num_of", [](MissingPlaces& self, Ints slots) { return owning_array(self.num_of(slots)); })
        .def_prop_ro("num_places", &MissingPlaces::num_places);
}

}  // namespace sglang_hvd
