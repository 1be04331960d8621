// The Python interface of the native core. It converts values and checks shapes; the algorithms are in
// the headers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "bound_arrays.hpp"
#include "cache_core.hpp"

namespace nb = nanobind;

namespace sglang_hvd {
namespace {

void commit(CacheCore& core, std::span<const std::int32_t> slots, const Input<std::int32_t, 2>& token_ids,
            std::span<const std::int32_t> lengths) {
    require(token_ids.shape(0) == slots.size() && lengths.size() == slots.size(),
            "token_ids and lengths need one row per request");
    core.commit(slots, token_ids.data(), token_ids.shape(1), lengths);
}

void propose(CacheCore& core, std::span<const std::int32_t> slots, std::span<const std::int32_t> max_nodes,
             bool is_tree, bool by_votes, bool with_evidence, nb::handle batch) {
    require(max_nodes.size() == slots.size(), "max_nodes needs one entry per request");
    const DraftRows rows = rows_of(batch, slots.size());
    const nb::gil_scoped_release nogil;
    core.propose(slots, is_tree ? DraftShape::kTree : DraftShape::kChain, by_votes, with_evidence, max_nodes, rows);
}

template <typename T>
nb::bytes bytes_of(const std::vector<T>& values) {
    return nb::bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

nb::tuple copy_after(const CacheCore& core, std::uint64_t serial, std::size_t max_tokens) {
    const auto copies = [&] {
        const nb::gil_scoped_release nogil;
        return core.copy_after(serial, max_tokens);
    }();
    nb::list names;
    for (const std::string& name : copies.names) names.append(name);
    return nb::make_tuple(names, bytes_of(copies.spaces), bytes_of(copies.lengths), bytes_of(copies.kept_at),
                          bytes_of(copies.token_ids), copies.last_serial);
}

nb::list contents(const CacheCore& core) {
    nb::list result;
    for (const auto& space : core.contents()) {
        result.append(nb::make_tuple(space.name, space.num_outputs, space.num_tokens, space.num_bytes,
                                     space.oldest, space.newest, space.num_drafts));
    }
    return result;
}

// The names of columns with their places.
nb::list columns_of(std::span<const Column> columns) {
    nb::list named;
    for (const auto& [name, place] : columns) named.append(nb::make_tuple(name, place));
    return named;
}

}  // namespace

void bind_suffix_cache(nb::module_& m) {
    using namespace nb::literals;
    using NoGil = nb::call_guard<nb::gil_scoped_release>;
    m.attr("MATCH_COLUMNS") = columns_of(kMatchNames);
    m.attr("EVIDENCE_FIELDS") = columns_of(kEvidenceNames);
    nb::dict origins;
    origins["PROMPT"] = static_cast<int>(MatchOrigin::kPrompt);
    origins["OUTPUT"] = static_cast<int>(MatchOrigin::kOutput);
    origins["SHARED"] = static_cast<int>(MatchOrigin::kShared);
    m.attr("MATCH_ORIGINS") = origins;
    nb::class_<PaperSettings>(m, "PaperSettings")
        .def(nb::init<int, int, float, float, float>(), nb::kw_only(), "max_depth"_a, "max_draft_tokens"_a,
             "max_spec_factor"_a, "max_spec_offset"_a, "min_token_prob"_a);
    nb::class_<CacheSettings>(m, "CacheSettings")
        .def(nb::init<std::size_t, std::size_t, std::size_t, bool, bool, float, std::optional<PaperSettings>>(),
             nb::kw_only(), "shared_tokens"_a, "namespace_tokens"_a, "session_tokens"_a,
             "indexes_in_background"_a, "is_deterministic"_a, "min_token_prob"_a, "paper"_a);
    nb::class_<CacheCore>(m, "CacheCore", "cache.py documents it and checks the arguments.")
        .def(nb::init<const CacheSettings&>())
        .def("start", &CacheCore::start, NoGil())
        .def("commit", &commit, NoGil())
        .def("propose", &propose)
        .def("finish", &CacheCore::finish, NoGil())
        .def("add", &CacheCore::add, NoGil())
        .def("copy_after", &copy_after)
        .def("contents", &contents)
        .def("flush", &CacheCore::flush, NoGil())
        .def("resize", &CacheCore::resize, NoGil())
        .def("flush_all", &CacheCore::flush_all, NoGil())
        .def("drain", &CacheCore::drain, NoGil())
        .def("check", &CacheCore::check, NoGil())
        .def("stats", [](const CacheCore& core) {
            const auto stats = [&core] {
                const nb::gil_scoped_release nogil;
                return core.stats();
            }();
            nb::dict result;
            result["num_requests"] = stats.num_requests;
            result["num_request_tokens"] = stats.num_request_tokens;
            result["num_shared_requests"] = stats.num_shared_requests;
            result["num_shared_tokens"] = stats.num_shared_tokens;
            result["num_namespaces"] = stats.num_namespaces;
            result["num_sessions"] = stats.num_sessions;
            result["num_session_tokens"] = stats.num_session_tokens;
            result["num_pending_tokens"] = stats.num_pending_tokens;
            result["num_bytes"] = stats.num_bytes;
            return result;
        });
}

}  // namespace sglang_hvd
