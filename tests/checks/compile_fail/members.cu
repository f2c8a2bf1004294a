// FAILS TRANSFORM_NOT_CONST: transform does not fit, and would be left out: it must be public, and declared as
// FAILS VISIBLE_OF_NUMBERS: declared as KERNELS_HD bool visible(const k::ScoreAt& at) const
// FAILS SINK_OF_NO_HEAD: declared as KERNELS_HD float sink(int64_t head) const
// FAILS SCORE_CHECK: declared as k::Status check(const k::AttentionShape& shape) const
// FAILS VIEW_ALIGNMENT_NOT_CONST: declared as int alignment() const
#include <kernels/attention.cuh>

namespace k = kernels;

struct Scored : k::Score {
  KERNELS_HD bool visible(const k::ScoreAt& at) const { return at.key == 0; }
};
struct Transformed : Scored {
  template <int N>
  KERNELS_HD k::Pack<float, N> transform(k::Pack<float, N> logits, const k::ScoreAt&) { return logits; }
};
struct Numbered : k::Score {
  KERNELS_HD bool visible(int64_t, int64_t) const { return true; }
  KERNELS_HD float sink(int64_t) const { return 0; }
};
struct Headless : Scored {
  KERNELS_HD float sink() const { return 0; }
};
struct Checked : Scored {
  k::Status check(int64_t, int64_t) const { return {}; }
};

using View = decltype(k::dense_kv(k::nhd(static_cast<const float*>(nullptr), 1, 1, 64),
                                  k::nhd(static_cast<const float*>(nullptr), 1, 1, 64), 1));
struct AlignedView : View {
  explicit AlignedView(const View& view) : View(view) {}
  int alignment() { return 16; }
};

// Right, though it inherits from a score of the library and has data by the name of another member.
struct RightHeir : k::SoftCap {
  int64_t sink = 4;  // keys that all queries see
  RightHeir() : k::SoftCap(30) {}
  KERNELS_HD bool visible(const k::ScoreAt& at) const { return at.key < sink || at.key > at.query - 64; }
};

template <class Kv, class S>
k::Status call(const Kv& kv, const S& score) {
  return k::attention<64>(cudaStream_t{}, k::load(static_cast<const float*>(nullptr), 64), kv,
                          k::store(static_cast<float*>(nullptr), 64), {1, 1, 1, 1, 64}, score);
}

k::Status f(const View& view) {
#if defined(TRANSFORM_NOT_CONST)
  return call(view, Transformed());
#elif defined(VISIBLE_OF_NUMBERS)
  return call(view, k::causal() & Numbered());
#elif defined(SINK_OF_NO_HEAD)
  return call(view, Headless());
#elif defined(SCORE_CHECK)
  return call(view, Checked());
#elif defined(VIEW_ALIGNMENT_NOT_CONST)
  return call(AlignedView(view), k::causal());
#else
  return call(view, RightHeir() & k::window(4, 0));
#endif
}
