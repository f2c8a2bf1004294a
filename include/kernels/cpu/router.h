// Routing for mixtures of experts on the CPU: chooses each token's experts, and sorts rows by expert.
//
//   k::cpu::Exec cx{threads};
//   k::cpu::route(cx, k::load(logits, E), ids, weights, {tokens, E, top_k}, k::Router{}.renormalize());
//   k::cpu::sort_by_expert(cx, ids, {offsets, order, places}, {tokens, E, top_k});
//
// router.h defines ids, weights, offsets, order and places, and has the sources that read rows in the sorted order and
// sum them up. Compiler flags: as in softmax.h.
#pragma once

#include "../router.h"
#include "detail/matmul/inputs.h"

KERNELS_BEGIN
namespace detail {
namespace host {

// The index of the largest rank; of equal ones the lowest.
inline int best_of(const uint32_t* ranks, int count) {
  int best = 0;
  for (int i = 1; i < count; ++i) {
    if (ranks[i] > ranks[best]) best = i;
  }
  return best;
}

// Sets the ranks of the experts in groups that are not kept to 0, which excludes them.
inline void keep_groups(const Router& options, uint32_t* ranks, int experts) {
  const int groups = options.group_count(), size = experts / groups;
  if (groups == 1) return;
  uint32_t scores[kMaxExpertGroups];
  for (int g = 0; g < groups; ++g) {
    uint32_t* const mine = ranks + g * size;
    const int best = best_of(mine, size);
    scores[g] = mine[best];
    if (!options.by_top_two()) continue;
    uint32_t second = 0;
    for (int i = 0; i < size; ++i) second = i != best ? greater(second, mine[i]) : second;
    scores[g] = rank_of(value_of_rank(scores[g]) + value_of_rank(second));
  }
  bool kept[kMaxExpertGroups] = {};
  for (int i = 0; i < options.groups_kept(); ++i) {
    const int g = best_of(scores, groups);
    kept[g] = true;
    scores[g] = 0;
  }
  for (int e = 0; e < experts; ++e) ranks[e] = kept[e / size] ? ranks[e] : 0;
}

inline void route_token(const Router& options, const float* logits, int experts, int top_k, int32_t* ids,
                        float* weights) {
  float largest = -infinity<float>(), sum = 0;
  for (int e = 0; e < experts; ++e) largest = logits[e] > largest ? logits[e] : largest;
  if (options.softmax_of_all()) {
    for (int e = 0; e < experts; ++e) sum += Router::shifted_exp(logits[e], largest);
  }
  uint32_t ranks[kMaxExperts];
  for (int e = 0; e < experts; ++e) ranks[e] = rank_of(options.selection_score(logits[e], e, largest, sum));
  keep_groups(options, ranks, experts);
  int chosen[kMaxTopK];
  float scores[kMaxTopK], total = 0, highest = -infinity<float>();
  for (int i = 0; i < top_k; ++i) {
    chosen[i] = best_of(ranks, experts);
    ranks[chosen[i]] = 0;
    scores[i] = options.score(logits[chosen[i]], largest, sum);
    highest = scores[i] > highest ? scores[i] : highest;
  }
  if (options.chosen_alone()) {
    float all = 0;
    for (int i = 0; i < top_k; ++i) all += Router::shifted_exp(scores[i], highest);
    for (int i = 0; i < top_k; ++i) scores[i] = Router::normalized(Router::shifted_exp(scores[i], highest), all);
  }
  for (int i = 0; i < top_k; ++i) total += scores[i];
  for (int i = 0; i < top_k; ++i) {
    ids[i] = options.id_here(chosen[i]);
    weights[i] = ids[i] < 0 ? 0.f : options.weight(scores[i], total);
  }
}

}  // namespace host
}  // namespace detail

namespace cpu {

template <class Logits>
Status route(const Exec& cx, const Logits& logits, int32_t* ids, float* weights, const RouterShape& shape,
             const Router& options = {}) {
  if constexpr (!::kernels::detail::takes_source<Logits>()) {
    return ::kernels::detail::not_compiled();
  } else {
    namespace host = ::kernels::detail::host;
    KERNELS_TRY(::kernels::detail::check_route(logits, ids, weights, shape, options));
    KERNELS_TRY(cx.status().in("route"));
    const int experts = int(shape.experts), top_k = int(shape.top_k);
    const host::Team team = cx.team().for_work(double(shape.tokens) * double(experts) * double(top_k));
    host::parallel_shares(team, shape.tokens, [&](int64_t begin, int64_t end) {
      float row[kMaxExperts];
      for (int64_t token = begin; token < end; ++token) {
        host::read_row(logits, token, 0, experts, row);
        host::route_token(options, row, experts, top_k, ids + token * top_k, weights + token * top_k);
      }
    });
    return {};
  }
}

// Runs on one thread: a single pass over a few numbers for each token. The workspace parameter matches the GPU version,
// which needs one for many choices.
inline size_t sort_workspace_bytes(const RouterShape&) { return 0; }
inline Status sort_by_expert(const Exec& cx, const int32_t* ids, const ExpertOrder& to, const RouterShape& shape,
                             const Workspace& = {}) {
  KERNELS_TRY(::kernels::detail::check_sort(ids, to, shape));
  KERNELS_TRY(cx.status().in("sort_by_expert"));
  const int64_t choices = shape.tokens * shape.top_k;
  const int32_t experts = int32_t(shape.experts);
  const auto is_there = [experts](int32_t id) { return id >= 0 && id < experts; };
  int32_t next[kMaxExperts] = {}, before = 0;
  for (int64_t i = 0; i < choices; ++i) {
    if (is_there(ids[i])) ++next[ids[i]];
  }
  for (int32_t e = 0; e < experts; ++e) {
    const int32_t count = next[e];
    to.offsets[e] = next[e] = before;
    before += count;
  }
  to.offsets[experts] = before;
  for (int64_t i = 0; i < choices; ++i) {
    const int32_t place = is_there(ids[i]) ? next[ids[i]]++ : -1;
    to.places[i] = place;
    if (place >= 0) to.order[place] = int32_t(i);
  }
  for (int64_t i = before; i < choices; ++i) to.order[i] = -1;
  return {};
}

}  // namespace cpu
KERNELS_END
