// The array types that the bindings of all packages accept, and how they refuse arguments. No file of an
// algorithm includes this.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>

namespace sglang_hvd {

template <typename T, int kDims>
using Input = nanobind::ndarray<const T, nanobind::ndim<kDims>, nanobind::c_contig, nanobind::device::cpu>;
template <typename T, int kDims>
using Output = nanobind::ndarray<T, nanobind::ndim<kDims>, nanobind::c_contig, nanobind::device::cpu>;

inline void require(bool is_true, const char* message) {
    if (!is_true) throw std::invalid_argument(message);
}

}  // namespace sglang_hvd
