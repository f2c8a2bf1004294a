// How attention and decoding on the CPU distribute work among threads: tiles of rows, splits of the keys, and the merge
// of partial results.
#pragma once

#include <atomic>

#include "rows.h"

KERNELS_BEGIN
namespace detail {
namespace host {

// Split-KV: the least number of keys in a split, and the most splits of a sequence.
constexpr int64_t kSplitKeys = 512;
constexpr int kMostSplits = 16;

// Calls f(i) for all i below count, in any order, on at most team.threads threads.
template <class F>
void each_item(int64_t count, const Team& team, const F& f) {
  std::atomic<int64_t> next{0};
  parallel(team, int(greater<int64_t>(1, lesser<int64_t>(team.threads, count))), [&](int) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(i);
  });
}

// How the keys of a sequence are split.
struct KeySplits {
  int64_t keys;
  int count;
  explicit KeySplits(int64_t length) {
    const int64_t least = (length + kMostSplits - 1) / kMostSplits;
    keys = greater(kSplitKeys, (least + kTileKeys - 1) / kTileKeys * kTileKeys);
    count = int(greater<int64_t>(1, (length + keys - 1) / keys));
  }
};

template <class Q, class Out>
Status check_in_place(const Q& q, const Out& out, const AttentionShape& shape) {
  return ::kernels::detail::check_in_place(q, out, shape, shape.heads == shape.kv_heads,
                                           "out overlaps q: in place needs as many kv_heads as heads");
}

template <class Kv>
Status check_length(const Kv&, int64_t) {
  return {};
}
template <class K, class V>
Status check_length(const KvCache<K, V, Dense>& kv, int64_t length) {
  const Dense& where = kv.where();
  return length > lesser(where.most_positions(kv.keys().positions()), where.most_positions(kv.values().positions()))
             ? invalid("a sequence has more keys than the positions that nhd() or hnd() was told of")
             : Status{};
}
template <class K, class V>
Status check_length(const KvCache<K, V, Paged>& kv, int64_t length) {
  return length > kv.where().most_positions(0)
             ? invalid("a sequence has more keys than its row of the page table has positions")
             : Status{};
}

// Only the CPU can check lengths and offsets against what the caller declared, as the host does not see those of the
// GPU.
template <class Kv>
Status check_lengths(const Kv& kv, const AttentionShape& shape) {
  for (int64_t b = 0; b < shape.batch; ++b) KERNELS_TRY(check_length(kv, kv.length(b)));
  if (shape.q_offsets == nullptr) return {};
  for (int64_t b = 0; b < shape.batch; ++b) {
    if (shape.q_offsets[b] < 0 || shape.q_offsets[b + 1] < shape.q_offsets[b])
      return invalid("q_offsets are negative or fall");
    if (shape.queries(b) > shape.q_len) return invalid("a sequence has more than q_len queries");
  }
  if (shape.tokens > 0 && shape.q_offsets[shape.batch] - shape.q_offsets[0] > shape.tokens)
    return invalid("q_offsets have more queries than `tokens`");
  return {};
}

template <class Call>
class AttentionRun {
  using Rows = AttentionRows<Call>;

 public:
  explicit AttentionRun(const Call& call)
      : c_(call), group_(call.shape.group()), tile_(lesser(Rows::most_rows(c_.shape), c_.shape.q_len * group_)) {
    if (tile_ >= group_) tile_ = tile_ / group_ * group_;  // no query spans two tiles
    tiles_ = (c_.shape.q_len * group_ + tile_ - 1) / tile_;
  }

  // Each item is a tile of rows with all of its keys. The last queries see the most keys, so they come first.
  void unsplit(const Team& all_threads) const {
    const Team team = with_work(all_threads);
    const int64_t heads = heads_per_item(c_.shape.batch * tiles_, team.threads),
                  groups = (c_.shape.kv_heads + heads - 1) / heads;
    each_item(c_.shape.batch * groups * tiles_, team, [&](int64_t i) {
      const int64_t each = c_.shape.batch * groups;
      const AttentionPart part = part_of(i % each / groups, i % groups * heads, heads, tiles_ - 1 - i / each);
      if (part.count <= 0) return;
      Rows rows(c_, part);
      rows.run();
      rows.finish();
    });
  }

  // Each item is a split of the keys; when all are done, the splits of a tile of rows are merged.
  void split(const Team& all_threads, float* states) const {
    const Team team = with_work(all_threads);
    const int64_t all = c_.shape.batch * c_.shape.kv_heads * tiles_, row = Rows::state_floats(c_.shape),
                  of_head = c_.shape.q_len * group_ * kMostSplits * row;
    const auto state_of = [&](const AttentionPart& part) {
      return states + (part.b * c_.shape.kv_heads + part.head) * of_head + part.first * kMostSplits * row;
    };
    int64_t splits_of_all = 0;
    for (int64_t b = 0; b < c_.shape.batch; ++b) splits_of_all += KeySplits(c_.kv.length(b)).count;
    const int64_t heads = heads_per_item(splits_of_all * tiles_, team.threads),
                  groups = (c_.shape.kv_heads + heads - 1) / heads;
    // Heads vary fastest: data next to a head's keys has come into a cache with them.
    const int64_t each = groups * tiles_;
    each_item(c_.shape.batch * each * kMostSplits, team, [&](int64_t i) {
      AttentionPart part = part_of(i / each / kMostSplits, i % each / tiles_ * heads, heads, i % tiles_);
      const KeySplits splits(part.end);
      const int split = int(i / each % kMostSplits);
      if (part.count <= 0 || split >= splits.count) return;
      part.begin = split * splits.keys;
      part.end = lesser(part.end, part.begin + splits.keys);
      Rows rows(c_, part);
      rows.run();
      if (splits.count == 1) rows.finish();
      else rows.save(state_of(part) + split * part.count * row, of_head);
    });
    each_item(all, team, [&](int64_t i) {
      const AttentionPart part = part_of(i / c_.shape.kv_heads / tiles_, i / tiles_ % c_.shape.kv_heads, 1, i % tiles_);
      const KeySplits splits(part.end);
      if (part.count > 0 && splits.count > 1) Rows(c_, part).merge(state_of(part), splits.count, part.count * row);
    });
  }

 private:
  // Few queries are limited by reading keys and values, many by products.
  Team with_work(const Team& all) const {
    double keys = 0, products = 0;
    for (int64_t b = 0; b < c_.shape.batch; ++b) {
      keys += double(c_.kv.length(b));
      products += double(c_.kv.length(b)) * double(c_.shape.queries(b));
    }
    const double dims = double(c_.shape.dim + c_.shape.value_dim());
    return all.for_work(keys * double(c_.shape.kv_heads) * dims, products * double(c_.shape.heads) * dims);
  }
  // The heads of keys in an item, if all of them would make `items` items: fewer than kHeadsPerItem if threads would be
  // idle.
  int64_t heads_per_item(int64_t items, int threads) const {
    int64_t heads = tile_ <= kFewRows ? kHeadsPerItem : 1;
    while (heads > 1 && threads > 1 && items * ((c_.shape.kv_heads + heads - 1) / heads) < 2 * threads) heads /= 2;
    return heads;
  }
  AttentionPart part_of(int64_t b, int64_t head, int64_t heads, int64_t tile) const {
    const int64_t first = tile * tile_;
    return {b,
            head,
            lesser(heads, c_.shape.kv_heads - head),
            first,
            lesser(tile_, c_.shape.queries(b) * group_ - first),
            0,
            c_.kv.length(b)};
  }

  const Call& c_;
  int64_t group_, tile_, tiles_;
};

// ---- merging parts of separate calls -------------------------------------------------------------------------------

template <class O, class L, class Out>
void merge_states(const Team& team, const O& o, const L& lse, const Out& out, const MergeShape& shape,
                  const Attention& options) {
  const auto map = sink_map(out);
  const auto& end = sink_end(out);
  const Packs<O, Out> packs(o, out, shape.dim);
  parallel_shares(team, shape.tokens, [&](int64_t begin, int64_t last) {
    for (int64_t t = begin; t < last; ++t) {
      for (int64_t head = 0; head < shape.heads; ++head) {
        const auto logsumexp = [&](int64_t part) {
          return convert<float>(
              resolve(lse, fetch<1>(lse, part * shape.tokens + t, head), part * shape.tokens + t, head).v[0]);
        };
        SoftmaxState<float> all;
        for (int64_t part = 0; part < shape.parts; ++part) all.merge(AttentionState<float, 1>(logsumexp(part), {}));
        packs.each(head * shape.dim, (head + 1) * shape.dim, [&](auto width, int64_t col) KERNELS_INLINE {
          AttentionState<float, width()> sum;
          for (int64_t part = 0; part < shape.parts; ++part) {
            const int64_t row = part * shape.tokens + t;
            sum.merge({logsumexp(part), convert<float>(resolve(o, fetch<width()>(o, row, col), row, col))});
          }
          put_mapped(end, map, sum.output(), t, col);
        });
        options.write_lse(all.logsumexp(), t, head, shape.heads);
      }
    }
  });
}

}  // namespace host
}  // namespace detail
KERNELS_END
