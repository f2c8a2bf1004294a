// FAILS TRANSFORM_NOT_CONST: transform does not fit, and would be left out: it must be public, and declared as
// FAILS TRANSFORM_OF_A_FLOAT: the functor's transform does not fit
// FAILS TRANSFORM_INHERITED: the functor's transform does not fit
// FAILS VISIBLE_OF_NUMBERS: declared as KERNELS_HD bool visible(const k::ScoreAt& at) const
// FAILS VISIBLE_KEYS_NOT_CONST: declared as KERNELS_HD uint32_t visible_keys(const k::ScoreAt& at) const
// FAILS KV_RANGE_OF_A_LOGIT: declared as KERNELS_HD k::KeyRange kv_range(const k::ScoreQueries& q) const
// FAILS SINK_OF_NO_HEAD: declared as KERNELS_HD float sink(int64_t head) const
// FAILS SINK_IN_A_PART: declared as KERNELS_HD float sink(int64_t head) const
// FAILS NOTHING: a score that would mask and change nothing
// FAILS SCORE_CHECK: declared as k::Status check(const k::AttentionShape& shape) const
// FAILS SCORE_CHECK_IN_A_PART: declared as k::Status check(const k::AttentionShape& shape) const
// FAILS VIEW_CHECK: declared as k::Status check(int64_t batch, int64_t heads, int64_t dim, int64_t v_dim) const
// FAILS VIEW_ALIGNMENT_NOT_CONST: declared as int alignment() const
// FAILS VIEW_ALIGNMENT_A_NUMBER: declared as int alignment() const
#include <kernels/cpu/attention.h>

namespace k = kernels;

// What has the right form beside the member that has not: a call that asked whether there is any would take it.
struct Scored : k::Score {
  bool visible(const k::ScoreAt& at) const { return at.key == 0; }
};
struct Transformed : Scored {
  template <int N>
  k::Pack<float, N> transform(k::Pack<float, N> logits, const k::ScoreAt&) { return logits; }
};
struct TransformedFloats : Scored {
  float transform(float logit, const k::ScoreAt&) const { return logit; }
};
struct Heir : Transformed {};
struct Numbered : k::Score {
  bool visible(int64_t, int64_t) const { return true; }
  float sink(int64_t) const { return 0; }
};
struct InRuns : Scored {
  uint32_t visible_keys(const k::ScoreAt&) { return 1; }
};
struct Ranged : Scored {
  k::KeyRange kv_range(const k::ScoreAt& at) const { return {0, at.key}; }
};
struct Headless : Scored {
  float sink() const { return 0; }
};
struct Checked : Scored {
  k::Status check(int64_t, int64_t) const { return {}; }
};
struct Nothing : k::Score {};

using View = decltype(k::dense_kv(k::nhd(static_cast<const float*>(nullptr), 1, 1, 64),
                                  k::nhd(static_cast<const float*>(nullptr), 1, 1, 64), 1));
struct CheckedView : View {
  explicit CheckedView(const View& view) : View(view) {}
  k::Status check(int64_t, int64_t) const { return {}; }
};
struct AlignedView : View {
  explicit AlignedView(const View& view) : View(view) {}
  int alignment() { return 16; }
};
struct Aligned16View : View {
  explicit Aligned16View(const View& view) : View(view) {}
  static constexpr int alignment = 16;
};

// These are right: members in their form, which are inherited or have data beside them, and data by the same names.
struct RightView : View {
  explicit RightView(const View& view) : View(view) {}
};
struct RightHeir : k::SoftCap {
  int64_t sink = 4;  // keys that all queries see
  RightHeir() : k::SoftCap(30) {}
  bool visible(const k::ScoreAt& at) const { return at.key < sink || at.key > at.query - 64; }
};
struct RightFinal final : k::Score {
  float sink(int64_t) const { return 0; }
};

template <class Kv, class S>
k::Status call(const Kv& kv, const S& score) {
  return k::cpu::attention(k::cpu::Exec{1}, k::load(static_cast<const float*>(nullptr), 64), kv,
                           k::store(static_cast<float*>(nullptr), 64), {1, 1, 1, 1, 64}, score);
}

k::Status f(const View& view) {
  KERNELS_TRY(call(RightView(view), RightHeir() & RightFinal() & k::window(4, 0)));
#if defined(TRANSFORM_NOT_CONST)
  return call(view, Transformed());
#elif defined(TRANSFORM_OF_A_FLOAT)
  return call(view, TransformedFloats());
#elif defined(TRANSFORM_INHERITED)
  return call(view, Heir());
#elif defined(VISIBLE_OF_NUMBERS)
  return call(view, Numbered());
#elif defined(VISIBLE_KEYS_NOT_CONST)
  return call(view, InRuns());
#elif defined(KV_RANGE_OF_A_LOGIT)
  return call(view, Ranged());
#elif defined(SINK_OF_NO_HEAD)
  return call(view, Headless());
#elif defined(SINK_IN_A_PART)
  return call(view, k::causal() & Headless());
#elif defined(NOTHING)
  return call(view, Nothing());
#elif defined(SCORE_CHECK)
  return call(view, Checked());
#elif defined(SCORE_CHECK_IN_A_PART)
  return call(view, Checked() & k::causal());
#elif defined(VIEW_CHECK)
  return call(CheckedView(view), k::causal());
#elif defined(VIEW_ALIGNMENT_NOT_CONST)
  return call(AlignedView(view), k::causal());
#elif defined(VIEW_ALIGNMENT_A_NUMBER)
  return call(Aligned16View(view), k::causal());
#else
  return {};
#endif
}
