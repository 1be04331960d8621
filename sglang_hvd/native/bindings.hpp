// The bindings of the native module, one function for each room. They convert and check arguments, and hold no
// logic.
#pragma once

#include <nanobind/nanobind.h>

namespace sglang_hvd {

void bind_suffix_cache(nanobind::module_& m);
void bind_payoff(nanobind::module_& m);
void bind_allocation(nanobind::module_& m);
void bind_drafter(nanobind::module_& m);
void bind_trees(nanobind::module_& m);
void bind_engine(nanobind::module_& m);

}  // namespace sglang_hvd
