// Routing for mixtures of experts: chooses each token's experts, and sorts rows by expert.
//
//   k::route(stream, k::load(logits, E), ids, weights, {tokens, E, top_k}, k::Router{}.renormalize());
//   k::sort_by_expert(stream, ids, {offsets, order, places}, {tokens, E, top_k}, workspace);
//
// router.h defines ids, weights, offsets, order and places, and has the sources that read rows in the sorted order and
// sum them up; docs/router.md shows a whole layer. Logits are a source of any type, with any maps. Up to 512 experts
// and 32 choices for each token. Each call is one launch; sorting more than 16,384 choices takes two. Nothing is
// allocated or synchronized: calls can be captured in a graph. The same input gives the same bits.
#pragma once

#include "core/arguments.h"
#include "detail/router.cuh"
#include "exec.cuh"

KERNELS_BEGIN

template <class Logits>
[[nodiscard]] Status route(const Exec& ex, const Logits& logits, int32_t* ids, float* weights, const RouterShape& shape,
                           const Router& options = {}) {
  if constexpr (!detail::takes_source<Logits>()) {
    return detail::not_compiled();
  } else {
    KERNELS_TRY(detail::check_route(logits, ids, weights, shape, options));
    KERNELS_TRY(ex.status().in("route"));
    if (shape.tokens == 0) return {};
    const auto start = [&](auto each) {
      using Body = detail::RouteBody<Logits, decltype(each)::value>;
      detail::Launch how;
      how.threads = Body::max_threads;
      how.grid.x = unsigned(lesser<int64_t>((shape.tokens + 3) / 4, int64_t(1) << 30));
      return detail::launch<Body>(ex, how,
                                  {logits, options, ids, weights, shape.tokens, int(shape.experts), int(shape.top_k)})
          .in("route");
    };
    if (shape.experts <= 64) return start(std::integral_constant<int, 2>());
    if (shape.experts <= 256) return start(std::integral_constant<int, 8>());
    return start(std::integral_constant<int, 16>());
  }
}

namespace detail {
// How many blocks share the choices, and how many each gets.
struct SortPlan {
  int64_t blocks = 1, each = 0;
  explicit SortPlan(int64_t choices) {
    constexpr int64_t kAlone = 16384, kMost = 64;
    if (choices > kAlone) blocks = lesser((choices + kAlone / 2 - 1) / (kAlone / 2), kMost);
    each = ((choices + blocks - 1) / blocks + 31) / 32 * 32;
  }
};
}  // namespace detail

// The workspace of sort_by_expert(); 0 for up to 16,384 choices.
inline size_t sort_workspace_bytes(const RouterShape& shape) {
  if (shape.tokens < 1 || shape.top_k < 1 || shape.experts < 1 || shape.tokens > INT32_MAX / shape.top_k) return 0;
  const int64_t blocks = detail::SortPlan(shape.tokens * shape.top_k).blocks;
  return blocks > 1 ? size_t(blocks * shape.experts) * sizeof(int32_t) : 0;
}

[[nodiscard]] inline Status sort_by_expert(const Exec& ex, const int32_t* ids, const ExpertOrder& to,
                                           const RouterShape& shape, const Workspace& workspace = {}) {
  KERNELS_TRY(detail::check_sort(ids, to, shape));
  KERNELS_TRY(detail::check_workspace(workspace, sort_workspace_bytes(shape), alignof(int32_t)).in("sort_by_expert"));
  KERNELS_TRY(ex.status().in("sort_by_expert"));
  const int64_t choices = shape.tokens * shape.top_k;
  const detail::SortPlan plan(choices);
  const detail::SortParams params{ids,     to,        static_cast<int32_t*>(workspace.ptr),
                                  choices, plan.each, int(shape.experts)};
  detail::Launch how;
  how.threads = detail::SortTables::kThreads;
  how.grid.x = unsigned(plan.blocks);
  if (plan.blocks > 1) KERNELS_TRY(detail::launch<detail::SortCountBody>(ex, how, params).in("sort_by_expert"));
  return detail::launch<detail::SortBody>(ex, how, params).in("sort_by_expert");
}

KERNELS_END
