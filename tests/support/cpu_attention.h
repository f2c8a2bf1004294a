// What the CPU's tests of keys and values share: a view, read by attention() and by decode(), against the oracle.
#pragma once

#include <kernels/cpu/attention.h>

#include "attention.h"
#include "threads.h"

namespace test {

template <class View, class K, class V>
void check_kv(Tally& t, const std::string& what, const AttentionCase& c, const View& kv, const K& key, const V& value) {
  const k::cpu::Exec cx = on_threads(2);
  AttentionData<> whole(c);
  whole.check(t, what,
              k::cpu::attention(cx, whole.source(), kv, whole.sink(), whole.shape(), k::causal(), whole.options()), key,
              value, causal_model(), 3);
  if (c.most_queries() > 32) return;
  AttentionData<> split(c);
  std::vector<float> memory(k::cpu::decode_workspace_bytes(split.shape()) / sizeof(float));
  const k::Workspace workspace{memory.data(), memory.size() * sizeof(float)};
  split.check(
      t, what + ", split",
      k::cpu::decode(cx, split.source(), kv, split.sink(), split.shape(), k::causal(), workspace, split.options()), key,
      value, causal_model(), 3);
}

template <class K, class V>
void check_kv(Tally& t, const std::string& what, const AttentionCase& c, const Placement& where, const K& key,
              const V& value) {
  const int32_t* lengths = where.short_lengths.data();
  if (where.layout == Layout::ragged) {
    check_kv(t, what, c, k::ragged_kv(key.tensor(), value.tensor(), where.offsets.data()), key, value);
  } else if (where.paged()) {
    check_kv(
        t, what, c,
        k::paged_kv(key.tensor(), value.tensor(), k::pages(where.table.data(), where.table_ld, where.page), lengths),
        key, value);
  } else {
    check_kv(t, what, c, k::dense_kv(key.tensor(), value.tensor(), lengths), key, value);
  }
}

// Few queries and many.
inline std::vector<AttentionCase> few_and_many() {
  return {
      {{1, 1, 1}, {170, 0, 600}, 4, 2, 32}, {{2, 2, 2}, {65, 1, 300}, 3, 1, 40}, {{21, 21, 21}, {70, 5, 0}, 4, 2, 48}};
}

}  // namespace test
