// Attention on the CPU: NaN and infinities.
#include "support/cpu_attention.h"
#include "support/not_finite.h"
#include "support/threads.h"

using namespace test;

namespace {

struct Calls {
  Tally& t;

  template <class Kv, class K, class V, class S, class Broken>
  void run(const std::string& what, const AttentionCase& c, const Kv& kv, const K& key, const V& value, const S& score,
           const ScoreModel& model, const Broken& broken) const {
    const k::cpu::Exec cx = on_threads(2);
    AttentionData<> whole(c), split(c);
    whole.broken = broken, split.broken = broken;
    whole.check(t, what, k::cpu::attention(cx, whole.source(), kv, whole.sink(), whole.shape(), score, whole.options()),
                key, value, model);
    std::vector<float> memory(k::cpu::decode_workspace_bytes(split.shape()) / sizeof(float));
    split.check(t, what + ", split",
                k::cpu::decode(cx, split.source(), kv, split.sink(), split.shape(), score,
                               {memory.data(), memory.size() * sizeof(float)}, split.options()),
                key, value, model);
  }
  template <class K, class V, class S, class Broken>
  void operator()(const std::string& what, const AttentionCase& c, const Placement& where, const K& key, const V& value,
                  const S& score, const ScoreModel& model, const Broken& broken) const {
    const int32_t* const lengths = where.short_lengths.data();
    if (where.paged())
      run(what + ", pages", c,
          k::paged_kv(key.tensor(), value.tensor(), k::pages(where.table.data(), where.table_ld, where.page), lengths),
          key, value, score, model, broken);
    else run(what, c, k::dense_kv(key.tensor(), value.tensor(), lengths), key, value, score, model, broken);
  }
};

}  // namespace

TEST_CASE("keys, values and scales that are not finite") {
  Tally t;
  check_not_finite_kv<HostMemory, k::half, k::Nothing>(Layout::nhd, Calls{t});
  check_not_finite_kv<HostMemory, k::half, k::Nothing>(Layout::paged_nhd, Calls{t});
  check_not_finite_kv<HostMemory, k::float8_e4m3, float>(Layout::paged_nhd, Calls{t});
  CHECK_TALLY(t);
}

TEST_CASE("logits that are not finite, also where keys are split") {
  Tally t;
  check_not_finite_logits<HostMemory>(Calls{t});
  CHECK_TALLY(t);
}

TEST_CASE("parts whose logsumexp is NaN or infinite") {
  Tally t;
  check_not_finite_parts<HostMemory>(
      t, [](const auto& o, const auto& lse, const auto& sink, const k::MergeShape& shape, const k::Attention& options) {
        return k::cpu::merge_states(on_threads(2), o, lse, sink, shape, options);
      });
  CHECK_TALLY(t);
}
