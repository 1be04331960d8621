// The Python interface of the native core. It converts values and checks shapes; the algorithms are in
// the headers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "bound_arrays.hpp"
#include "cache_core.hpp"

namespace nb = nanobind;

namespace sglang_hvd {
namespace {

void commit(CacheCore& core, const Input<std::int32_t, 1>& slots,
            const Input<std::int32_t, 2>& token_ids, const Input<std::int32_t, 1>& lengths) {
    require(token_ids.shape(0) == slots.size() && lengths.size() == slots.size(),
            "token_ids and lengths need one row per request");
    const nb::gil_scoped_release nogil;
    core.commit({slots.data(), slots.size()}, token_ids.data(), token_ids.shape(1),
                {lengths.data(), lengths.size()});
}

void propose(CacheCore& core, const Input<std::int32_t, 1>& slots,
             const Input<std::int32_t, 1>& max_nodes, bool is_tree, bool by_votes,
             bool with_evidence, const Output<std::int32_t, 2>& token_ids,
             const Output<std::int32_t, 2>& parents, const Output<std::int32_t, 2>& depths,
             const Output<float, 2>& probs, const Output<std::int32_t, 1>& lengths,
             const Output<float, 2>& matches, const Output<float, 2>& evidence) {
    const std::size_t num_rows = slots.size(), width = token_ids.shape(1);
    require(max_nodes.size() == num_rows, "max_nodes needs one entry per request");
    require(token_ids.shape(0) >= num_rows && lengths.size() >= num_rows &&
                matches.shape(0) >= num_rows && evidence.shape(0) >= num_rows &&
                parents.shape(0) == token_ids.shape(0) &&
                depths.shape(0) == token_ids.shape(0) && probs.shape(0) == token_ids.shape(0),
            "the batch has fewer rows than there are requests: make a larger one");
    require(parents.shape(1) == width && depths.shape(1) == width && probs.shape(1) == width &&
                matches.shape(1) == kMatchColumns && evidence.shape(1) == kEvidenceColumns,
            "the arrays of the batch have different widths");
    thread_local std::vector<Draft> reused;
    std::vector<Draft>& drafts = reused;
    drafts.resize(num_rows);
    for (std::size_t row = 0; row < num_rows; ++row) {
        const std::size_t first = row * width;
        drafts[row] = {{token_ids.data() + first, width},
                       {parents.data() + first, width},
                       {depths.data() + first, width},
                       {probs.data() + first, width},
                       0,
                       {},
                       {}};
    }
    {
        const nb::gil_scoped_release nogil;
        core.propose({slots.data(), num_rows}, is_tree ? DraftShape::kTree : DraftShape::kChain, by_votes,
                     with_evidence, {max_nodes.data(), num_rows}, drafts);
    }
    for (std::size_t row = 0; row < num_rows; ++row) {
        lengths.data()[row] = drafts[row].num_nodes;
        std::memcpy(matches.data() + row * kMatchColumns, &drafts[row].match,
                    sizeof(Match));
        if (!with_evidence) continue;
        std::memcpy(evidence.data() + row * kEvidenceColumns, &drafts[row].evidence,
                    sizeof(DraftEvidence));
    }
}

// The names of columns with their places.
nb::list columns_of(std::span<const Column> columns) {
    nb::list named;
    for (const auto& [name, place] : columns) named.append(nb::make_tuple(name, place));
    return named;
}

CacheSettings settings_of(std::size_t shared_tokens, std::size_t namespace_tokens,
                          float min_token_prob) {
    CacheSettings settings;
    settings.shared_tokens = shared_tokens;
    settings.namespace_tokens = namespace_tokens;
    settings.min_token_prob = min_token_prob;
    return settings;
}

}  // namespace
}  // namespace sglang_hvd

NB_MODULE(_native, m) {
    using namespace sglang_hvd;
    nb::set_leak_warnings(false);  // an interpreter may end without freeing its objects
    using namespace nb::literals;
    using NoGil = nb::call_guard<nb::gil_scoped_release>;
    m.attr("MATCH_COLUMNS") = columns_of(kMatchNames);
    m.attr("EVIDENCE_FIELDS") = columns_of(kEvidenceNames);
    nb::dict origins;
    origins["PROMPT"] = static_cast<int>(MatchOrigin::kPrompt);
    origins["OUTPUT"] = static_cast<int>(MatchOrigin::kOutput);
    origins["SHARED"] = static_cast<int>(MatchOrigin::kShared);
    m.attr("MATCH_ORIGINS") = origins;
    nb::class_<CacheCore>(m, "CacheCore", "cache.py documents it and checks the arguments.")
        .def(
            "__init__",
            [](CacheCore* self, std::size_t shared_tokens, std::size_t namespace_tokens,
               std::size_t session_tokens, bool indexes_in_background, float min_token_prob) {
                auto settings = settings_of(shared_tokens, namespace_tokens, min_token_prob);
                settings.session_tokens = session_tokens;
                settings.indexes_in_background = indexes_in_background;
                new (self) CacheCore(settings);
            },
            nb::kw_only(), "shared_tokens"_a, "namespace_tokens"_a, "session_tokens"_a,
            "indexes_in_background"_a, "min_token_prob"_a)
        .def_static(
            "as_in_paper",
            [](std::size_t shared_tokens, std::size_t namespace_tokens, int max_depth,
               int max_draft_tokens, float max_spec_factor, float max_spec_offset,
               float min_token_prob) {
                auto settings = settings_of(shared_tokens, namespace_tokens, 0);
                settings.paper = {max_depth, max_draft_tokens, max_spec_factor, max_spec_offset,
                                  min_token_prob};
                return new CacheCore(settings);
            },
            nb::kw_only(), "shared_tokens"_a, "namespace_tokens"_a, "max_depth"_a,
            "max_draft_tokens"_a, "max_spec_factor"_a, "max_spec_offset"_a, "min_token_prob"_a)
        .def(
            "start",
            [](CacheCore& core, const std::string& space, const Input<std::int32_t, 1>& prompt) {
                const nb::gil_scoped_release nogil;
                return core.start(space, {prompt.data(), prompt.size()});
            },
            "namespace"_a, "prompt_ids"_a.noconvert())
        .def("commit", &commit, "slots"_a.noconvert(), "token_ids"_a.noconvert(),
             "lengths"_a.noconvert())
        .def("propose", &propose, "slots"_a.noconvert(), "max_nodes"_a.noconvert(), "is_tree"_a, "by_votes"_a,
             "with_evidence"_a, "token_ids"_a.noconvert(), "parents"_a.noconvert(), "depths"_a.noconvert(),
             "probs"_a.noconvert(), "lengths"_a.noconvert(), "matches"_a.noconvert(),
             "evidence"_a.noconvert())
        .def(
            "finish",
            [](CacheCore& core, std::int32_t slot, bool keeps,
               const std::optional<Input<std::int32_t, 1>>& output) {
                std::optional<std::span<const Token>> tokens;
                if (output) tokens = std::span<const Token>(output->data(), output->size());
                const nb::gil_scoped_release nogil;
                core.finish(slot, keeps, tokens);
            },
            "slot"_a, "keep"_a, "output_ids"_a.noconvert().none())
        .def("flush", &CacheCore::flush, "namespace"_a, NoGil())
        .def("resize", &CacheCore::resize, "shared_tokens"_a, "namespace_tokens"_a, NoGil())
        .def("flush_all", &CacheCore::flush_all, NoGil())
        .def("drain", &CacheCore::drain, NoGil())
        .def(
            "check",
            [](const CacheCore& core) {
                const char* broken = core.check();
                return broken ? std::optional<std::string>(broken) : std::nullopt;
            },
            NoGil())
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
