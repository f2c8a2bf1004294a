// The parts of a mixture of experts around its products: choosing experts for each token, sorting rows by expert, and
// summing the experts' results.
//
//   k::route(ex, k::load(logits, E), ids, weights, {tokens, E, top_k}, k::Router{}.renormalize());      // router.cuh
//   k::sort_by_expert(ex, ids, {offsets, order, places}, {tokens, E, top_k}, workspace);
//
//   const k::Groups groups{E, offsets};
//   k::matmul(ex, k::gathered(k::load(x, D), order, top_k), k::gated(w1, w3), k::swiglu() | k::store(h, F),
//             {tokens * top_k, F, D}, groups);
//   k::matmul(ex, k::load(h, F), w2, k::store(y, D), {tokens * top_k, D, F}, groups);
//   k::copy(ex, k::combined(k::load(y, D), places, weights, top_k) | k::add(k::load(res, D)), k::store(res, D),
//           tokens, D);
//
// ids and weights have top_k entries for each token, the best choice first. An id of -1 is skipped: it stands for an
// expert on another device, or for a dropped token. Calls with few tokens need no sorting: experts() and mixed() in
// weights.h take ids and weights directly.
//
// Sources       combined(source, places, weights, top_k); gathered(source, order, top_k) is in weights.h
#pragma once

#include "core/softmax_state.h"
#include "weights.h"

KERNELS_BEGIN

// Logits are tokens x experts; each token gets top_k choices.
struct RouterShape {
  int64_t tokens, experts, top_k;
};

constexpr int kMaxExperts = 512, kMaxTopK = 32, kMaxExpertGroups = 32;

// How a group of experts is scored: by its best expert (DeepSeek-V2), or by the sum of its two best (DeepSeek-V3).
enum class GroupScore { largest, two_largest };

namespace detail {
enum class Scores { softmax, sigmoid, softmax_of_chosen };
}  // namespace detail

// The routing rule. Presets:
//
//   Mixtral, Qwen   Router{}.renormalize()
//   GPT-OSS         Router{}.softmax_of_chosen()
//   DeepSeek-V2     Router{}.groups(8, 3).scale(16)
//   DeepSeek-V3     Router{}.sigmoid().bias(p).groups(8, 4, GroupScore::two_largest).renormalize().scale(2.5)
//
// A token's experts are the top_k with the largest score + bias among the groups that are kept; of equal ones the lower
// index comes first, and NaN is less than every number. A token's weights are the scores of its experts, without the
// bias. Unless a bias or two_largest needs scores, experts are compared by their logits: the order is the same, and
// does not depend on how a machine rounds exp.
//
// A logit of -infinity masks an expert: its weight is 0. Weights are not NaN if all logits are finite or -infinity:
// scores that are all 0 stay 0. A NaN or +infinity makes all weights of a softmax NaN. The sigmoid of a NaN is NaN and
// is chosen last.
class Router {
 public:
  Router& softmax() { return scores(detail::Scores::softmax); }  // over all experts: the default
  Router& sigmoid() { return scores(detail::Scores::sigmoid); }
  // Softmax over the chosen logits only. Experts are chosen by their logits.
  Router& softmax_of_chosen() { return scores(detail::Scores::softmax_of_chosen); }
  // renormalize() divides weights by their sum; scale() multiplies them after that.
  Router& renormalize(bool on = true) { renormalize_ = on; return *this; }
  Router& scale(float factor) { scale_ = factor; return *this; }
  // One float for each expert, in the memory space in which the call runs.
  Router& bias(const float* p) { bias_ = p, biased_ = true; return *this; }
  // Experts form `count` groups of equal size, in order of index. Only experts of the `kept` groups with the largest
  // score can be chosen; of equal groups the lower index comes first.
  Router& groups(int count, int kept, GroupScore by = GroupScore::largest) {
    groups_ = count, kept_ = kept, by_ = by;
    return *this;
  }
  // For expert parallelism: this device has the weights of experts [first, first + count). Ids are relative to `first`;
  // other experts get id -1 and weight 0.
  Router& local(int first, int count) { first_ = first, count_ = count, local_ = true; return *this; }

  Status check(const RouterShape& shape) const {
    if (shape.tokens < 0) return invalid("route: tokens is negative");
    if (shape.experts < 1) return invalid("route: experts is less than 1");
    if (shape.top_k < 1) return invalid("route: top_k is less than 1");
    if (shape.experts > kMaxExperts) return unsupported("route: experts exceeds 512");
    if (shape.top_k > kMaxTopK) return unsupported("route: top_k exceeds 32");
    if (shape.top_k > shape.experts) return invalid("route: top_k exceeds experts");
    if (groups_ < 1) return invalid("route: groups: count is less than 1");
    if (kept_ < 1) return invalid("route: groups: kept is less than 1");
    if (kept_ > groups_) return invalid("route: groups: kept exceeds count");
    if (groups_ > kMaxExpertGroups) return unsupported("route: groups: count exceeds 32");
    if (shape.experts % groups_ != 0) return invalid("route: groups: their number does not divide that of the experts");
    if (shape.top_k > shape.experts / groups_ * kept_)
      return invalid("route: top_k exceeds the number of experts in the groups that are kept");
    if (by_ == GroupScore::two_largest && shape.experts / groups_ < 2)
      return invalid("route: groups: one expert alone has no two best");
    if (!(scale_ - scale_ == 0)) return invalid("route: scale: the factor is not finite");
    if (local_ && (first_ < 0 || count_ < 0 || int64_t(first_) + count_ > shape.experts))
      return invalid("route: local: not all of these experts are among those of the call");
    if (biased_)
      return detail::check_pointer(bias_, "route: bias: the pointer is null",
                                   "route: bias: the pointer is not aligned for floats");
    return {};
  }

  // The members below are for the engines.
  KERNELS_HD bool renormalizes() const { return renormalize_; }
  KERNELS_HD bool softmax_of_all() const { return scores_ == detail::Scores::softmax; }
  KERNELS_HD bool chosen_alone() const { return scores_ == detail::Scores::softmax_of_chosen; }
  KERNELS_HD int group_count() const { return kept_ < groups_ ? groups_ : 1; }
  KERNELS_HD int groups_kept() const { return kept_; }
  KERNELS_HD bool by_top_two() const { return by_ == GroupScore::two_largest; }
  // largest, sum: of the token's softmax.
  KERNELS_HD float score(float logit, float largest, float sum) const {
    if (scores_ == detail::Scores::sigmoid) return kernels::sigmoid(logit);
    return scores_ == detail::Scores::softmax ? normalized(shifted_exp(logit, largest), sum) : logit;
  }
  // The key by which experts are compared.
  KERNELS_HD float selection_score(float logit, int expert, float largest, float sum) const {
    if (!needs_scores()) return logit;
    const float s = score(logit, largest, sum);
    return biased_ ? s + bias_[expert] : s;
  }
  KERNELS_HD bool needs_scores() const { return biased_ || (by_top_two() && group_count() > 1); }
  static KERNELS_HD float shifted_exp(float logit, float largest) { return exp(logit - softmax_reference(largest)); }
  static KERNELS_HD float normalized(float part, float sum) { return sum == 0.f ? 0.f : divide(part, sum); }
  KERNELS_HD int id_here(int expert) const {
    if (!local_) return expert;
    return expert >= first_ && expert - first_ < count_ ? expert - first_ : -1;
  }
  KERNELS_HD float weight(float score, float sum) const {
    return (renormalize_ ? normalized(score, sum) : score) * scale_;
  }

 private:
  Router& scores(detail::Scores s) { scores_ = s; return *this; }

  detail::Scores scores_ = detail::Scores::softmax;
  bool renormalize_ = false, biased_ = false, local_ = false;
  GroupScore by_ = GroupScore::largest;
  float scale_ = 1;
  const float* bias_ = nullptr;
  int groups_ = 1, kept_ = 1, first_ = 0, count_ = 0;
};

namespace detail {

// An integer with the order of the floats: NaN below everything, -0 equal to 0. Rank 0 is below the rank of every
// float: it marks what cannot be chosen.
KERNELS_HD uint32_t rank_of(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x), size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return 1;
  return size == 0 ? 0x80000000u : bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}
KERNELS_HD float value_of_rank(uint32_t rank) {
  if (rank <= 1) return bit_cast<float>(0x7fc00000u);
  return bit_cast<float>(rank >> 31 != 0 ? rank & 0x7fffffffu : ~rank);
}

template <class Logits>
Status check_route(const Logits& logits, const int32_t* ids, const float* weights, const RouterShape& shape,
                   const Router& options) {
  KERNELS_TRY(options.check(shape));
  if (shape.tokens == 0) return {};
  if (shape.tokens > INT64_MAX / (4 * kMaxTopK)) return invalid("route: tokens x top_k exceeds 64 bits");
  KERNELS_TRY(check_of(logits, shape.tokens, shape.experts).of("logits").in("route"));
  KERNELS_TRY(check_pointer(ids, "route: ids: the pointer is null",
                            "route: ids: the pointer is not aligned for 32-bit numbers"));
  return check_pointer(weights, "route: weights: the pointer is null",
                       "route: weights: the pointer is not aligned for floats");
}

}  // namespace detail

// ---- rows in the order of their experts ----------------------------------------------------------------------------

// The result of sort_by_expert(). Choice i of token t has index t * top_k + i. All three arrays are written, in the
// memory space in which the call runs:
//   offsets   experts + 1 entries: expert e has rows offsets[e] to offsets[e + 1] - 1, as Groups expects
//   order     tokens x top_k entries: for each row the index of its choice, ascending within an expert; -1 after
//             the last row
//   places    tokens x top_k entries: for each choice its row, or -1
struct ExpertOrder {
  int32_t *offsets, *order, *places;
};

namespace detail {

// ids: tokens x top_k choices. An id that is not an expert's (-1) gets no row.
inline Status check_sort(const int32_t* ids, const ExpertOrder& to, const RouterShape& shape) {
  if (shape.tokens < 0) return invalid("sort_by_expert: tokens is negative");
  if (shape.top_k < 1) return invalid("sort_by_expert: top_k is less than 1");
  if (shape.experts < 1) return invalid("sort_by_expert: experts is less than 1");
  if (shape.experts > kMaxExperts) return unsupported("sort_by_expert: experts exceeds 512");
  if (shape.tokens > INT32_MAX / shape.top_k)
    return unsupported("sort_by_expert: there are more than 2^31 - 1 choices");
  KERNELS_TRY(check_pointer(to.offsets, "sort_by_expert: offsets: the pointer is null",
                            "sort_by_expert: offsets: the pointer is not aligned for 32-bit numbers"));
  if (shape.tokens == 0) return {};
  KERNELS_TRY(check_pointer(ids, "sort_by_expert: ids: the pointer is null",
                            "sort_by_expert: ids: the pointer is not aligned for 32-bit numbers"));
  KERNELS_TRY(check_pointer(to.order, "sort_by_expert: order: the pointer is null",
                            "sort_by_expert: order: the pointer is not aligned for 32-bit numbers"));
  return check_pointer(to.places, "sort_by_expert: places: the pointer is null",
                       "sort_by_expert: places: the pointer is not aligned for 32-bit numbers");
}

}  // namespace detail

// Sums the experts' results of each token: row t is the sum over i, in ascending order, of weights[t * top_k + i] times
// row places[t * top_k + i] of the source; choices with a negative place are skipped. The order is fixed, so the same
// input gives the same bits.
template <class S>
class Combined : public Functor {
 public:
  static constexpr Role role = Role::source;
  static constexpr bool has_effects = false;  // combined() does not take a source with any
  Combined(S source, const int32_t* places, const float* weights, int64_t top_k)
      : source_(source), places_(places), weights_(weights), top_k_(top_k) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return detail::max_pack_of(source_); }
  Status check(int64_t rows, int64_t cols) const {
    if (top_k_ < 1) return invalid("combined: top_k is less than 1");
    if (rows > INT32_MAX / top_k_) return unsupported("combined: there are more than 2^31 - 1 choices");
    KERNELS_TRY(detail::check_pointer(places_, "combined: the pointer to the places is null",
                                      "combined: the pointer to the places is not aligned for 32-bit numbers"));
    KERNELS_TRY(detail::check_pointer(weights_, "combined: the pointer to the weights is null",
                                      "combined: the pointer to the weights is not aligned for floats"));
    return detail::check_of(source_, rows * top_k_, cols);
  }
  template <int N>
  KERNELS_HD auto load(int64_t row, int64_t col) const {
    using C = compute_type<S>;
    using Fetched = decltype(detail::fetch<N>(source_, row, col));
    constexpr int kUnroll = 4;  // loads in flight at a time
    Pack<C, N> sum = broadcast<N>(C(0));
    const int64_t first = row * top_k_, end = first + top_k_;
    for (int64_t choice = first; choice < end; choice += kUnroll) {
      int32_t at[kUnroll];
      Fetched fetched[kUnroll] = {};  // initialized because compilers do not see that only fetched entries are read
      KERNELS_UNROLL
      for (int i = 0; i < kUnroll; ++i) at[i] = choice + i < end ? places_[choice + i] : -1;
      KERNELS_UNROLL
      for (int i = 0; i < kUnroll; ++i) {
        if (at[i] >= 0) fetched[i] = detail::fetch<N>(source_, at[i], col);
      }
      KERNELS_UNROLL
      for (int i = 0; i < kUnroll; ++i) {
        if (at[i] >= 0)
          sum = sum + convert<C>(detail::resolve(source_, fetched[i], at[i], col)) * C(weights_[choice + i]);
      }
    }
    return sum;
  }

 private:
  S source_;
  const int32_t* places_;
  const float* weights_;
  int64_t top_k_;
};

// places: from sort_by_expert(). weights: from route().
template <class S>
Combined<S> combined(S source, const int32_t* places, const float* weights, int64_t top_k) {
  static_assert(detail::is_source<S>, "combined() takes a source, the places of its rows, their weights and top_k");
  static_assert(
      !detail::has_effects<S>,
      "combined() may read a row several times, and tee() or another effect must happen once: write these rows before");
  return {source, places, weights, top_k};
}

KERNELS_END
