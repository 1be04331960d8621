#include <nanobind/nanobind.h>

#include "bindings.hpp"

NB_MODULE(_native, m) {
    nanobind::set_leak_warnings(false);  // an interpreter may end before its objects do
    sglang_hvd::bind_suffix_cache(m);
    sglang_hvd::bind_payoff(m);
    sglang_hvd::bind_allocation(m);
    sglang_hvd::bind_drafter(m);
    sglang_hvd::bind_trees(m);
    sglang_hvd::bind_engine(m);
}
