// Attention on the CPU: o = softmax(q k^T) v, tile by tile of the keys, with an online softmax (core/softmax_state.h)
// for each row.
//
// A row is a query of a head. One thread processes the rows of all heads that share keys, for one or more queries,
// together, so that keys and values are read once for all of them. For each tile of keys it computes the logits,
// applies the score, computes the weights relative to the largest logit so far, and adds the values times the weights
// to the output, which is rescaled when a larger logit turns up. With few rows, keys and values are multiplied as they
// are in memory (as in gemv.h); with many, in tiles that are transposed first (as in gemm.h). All buffers are on the
// stack.
//
// With few rows, several heads of keys take turns tile by tile, so that keys are read in the order of memory.
//
// Decoding splits long sequences (split-KV): the splits' states go through a workspace and are merged in order. Splits
// and tiles depend on lengths and shape only, not on threads or on the rest of the batch.
#pragma once

#include "../../../heads.h"
#include "../../../score.h"
#include "../matmul/gemm.h"
#include "../matmul/gemv.h"
#include "runs.h"
#include "sizes.h"
#include "vectors.h"

KERNELS_BEGIN
namespace detail {
namespace host {

template <class Q, class Kv, class S, class Out>
struct AttentionCall {
  const Q& q;
  const Kv& kv;
  const S& score;
  const Out& out;
  const AttentionShape& shape;
  const Attention& options;
};

// The rows [first, first + count) of a sequence for each of the `heads` kv heads from `head` on, and the keys [begin,
// end). Row r is query r / group of head r % group of those that share the kv head.
struct AttentionPart {
  int64_t b, head, heads, first, count, begin, end;
};

template <class Call>
class AttentionRows;
template <class Q, class Kv, class S, class Out>
class AttentionRows<AttentionCall<Q, Kv, S, Out>> {
  using Call = AttentionCall<Q, Kv, S, Out>;
  using T = Tiles<float>;
  using Sizes = AttentionSizes;
  using KeyRun = std::decay_t<decltype(std::declval<const Kv&>().key(kAny, kAny, kAny))>;
  using ValueRun = std::decay_t<decltype(std::declval<const Kv&>().value(kAny, kAny, kAny))>;
  using KeyStretch = DecodedStretch<typename KeyRun::Codes>;
  using ValueStretch = DecodedStretch<typename ValueRun::Codes>;
  static constexpr int N = kLanes<float>;

 public:
  // The most rows that are processed together.
  static int64_t most_rows(const AttentionShape& shape) {
    const Sizes s(shape, kMostRows);
    const int64_t rows = (kAttentionFloats - s.shared) / s.each / T::rows * T::rows;
    return lesser<int64_t>(rows, kMostRows / T::rows * T::rows);
  }

  AttentionRows(const Call& call, const AttentionPart& part)
      : c_(call),
        part_(part),
        sizes_(call.shape, part.count),
        few_(part.count <= kFewRows),
        heads_(int(part.heads)),
        each_(int(part.count)),
        count_(heads_ * each_),
        padded_((count_ + T::rows - (few_ ? 0 : 1)) / T::rows * T::rows),
        group_(call.shape.group()),
        dim_(call.shape.dim),
        v_dim_(call.shape.value_dim()),
        weights_stride_(few_ ? kTileKeys : T::depth),
        keys_(heads_, int(sizes_.keys)),
        values_(heads_, int(sizes_.keys)) {
    float* at = memory_;
    const auto take = [&at](int64_t floats) { float* const p = at; at += floats; return p; };
    q_ = take(padded_ * sizes_.q);
    o_ = take(padded_ * sizes_.o);
    logits_ = take(padded_ * sizes_.keys);
    weights_ = take(padded_ * weights_stride_);
    transposed_keys_ = take(sizes_.transposed_keys);
    transposed_values_ = take(sizes_.transposed_values);
    rows_ = take(sizes_.rows);
  }

  void run() {
    q_len_ = c_.shape.queries(part_.b);
    kv_len_ = c_.kv.length(part_.b);
    int64_t begin = part_.end, end = part_.begin;
    for (int r = 0; r < count_; ++r) {
      const int64_t query = query_of(r);
      const KeyRange seen = key_range(c_.score, {part_.b, query, query, q_len_, kv_len_});
      ranges_[r] = {greater(seen.begin, part_.begin), lesser(seen.end, part_.end)};
      if (ranges_[r].begin >= ranges_[r].end) continue;
      begin = lesser(begin, ranges_[r].begin);
      end = greater(end, ranges_[r].end);
    }
    int keys = gather_keys(begin, end);
    // While queries are read. All others are prefetched by those before them.
    if (few_) {
      const Ahead first = keys_.ahead(0, heads_ * lesser(kBlockKeys, keys), dim_, dim_);
      for (int i = 0; i < first.count; ++i) first(i);
    }
    read_queries();
    fill(o_, padded_ * sizes_.o, 0.f);
    gather_values(begin, keys);
    for (; keys > 0; begin += sizes_.keys) {
      if (few_) few_logits(keys);
      else many_logits(begin, keys);
      for (int r = 0; r < count_; ++r) weigh(r, begin, keys);
      const int next = gather_keys(begin + sizes_.keys, end);
      if (few_) few_values(keys, next);
      else many_values(begin, keys, next);
      gather_values(begin + sizes_.keys, next);
      keys = next;
    }
    if (few_) put_in_order();
  }

  // Writes the results of rows whose keys have all been processed.
  void finish() {
    for (int r = 0; r < count_; ++r) {
      SoftmaxState<float> state = states_[r];
      float scale = 1;
      if constexpr (score_sinks<S>) scale = state.merge(sink_state(c_.score, head_of(r))).mine;
      write(
          r, [&](auto width, int64_t col) KERNELS_INLINE { return pack_at<width()>(at_column(r, int(col))) * scale; },
          state);
    }
  }

  // The state of a row in floats: m, l and o.
  static int64_t state_floats(const AttentionShape& shape) { return shape.value_dim() + 2; }
  // Saves the states of a part; those of the next kv head are `stride` floats further.
  void save(float* first, int64_t stride) const {
    for (int r = 0; r < count_; ++r) {
      float* const to = first + r / each_ * stride + r % each_ * state_floats(c_.shape);
      to[0] = states_[r].m, to[1] = states_[r].l;
      for (int64_t col = 0; col < v_dim_; col += 8) copy_bytes<32>(to + 2 + col, at_column(r, int(col)));
    }
  }
  // Merges and writes rows whose keys were split into `count` parts, `stride` floats apart.
  void merge(const float* parts, int count, int64_t stride) {
    q_len_ = c_.shape.queries(part_.b);
    for (int r = 0; r < count_; ++r, parts += state_floats(c_.shape)) {
      SoftmaxState<float> all;
      if constexpr (score_sinks<S>) all = sink_state(c_.score, head_of(r));
      float* const o = rows_;
      fill(o, v_dim_, 0.f);
      for (int i = 0; i < count; ++i) {
        const float* const part = parts + i * stride;
        const auto factors = all.merge({part[0], part[1]});
        for (int64_t col = 0; col < v_dim_; col += 8) {
          const Pack<float, 8> sum = pack_at<8>(o + col) * factors.mine + pack_at<8>(part + 2 + col) * factors.other;
          copy_bytes<32>(o + col, sum.v);
        }
      }
      write(r, [&](auto width, int64_t col) KERNELS_INLINE { return pack_at<width()>(o + col); }, all);
    }
  }

 private:
  int64_t query_of(int r) const { return (part_.first + r % each_) / group_; }
  int64_t head_of(int r) const { return (part_.head + r / each_) * group_ + (part_.first + r % each_) % group_; }
  int64_t token_of(int r) const { return c_.shape.first_query(part_.b) + query_of(r); }

  template <int M>
  static KERNELS_INLINE Pack<float, M> pack_at(const float* from) {
    Pack<float, M> v;
    copy_bytes<int(sizeof(v.v))>(v.v, from);
    return v;
  }

  // The place of row r in panels of T::cols columns, or keys; each panel has all rows.
  float* in_panel(float* panels, int r, int i) const {
    const auto at = unsigned(i);  // unsigned, so that the division by a power of two is a shift
    return panels + (int64_t(at / T::cols) * padded_ + r) * T::cols + at % T::cols;
  }
  float* at_column(int r, int col) const { return in_panel(o_, r, col); }

  // ---- queries and keys --------------------------------------------------------------------------------------------

  // Reads the queries, times the scale. With many rows, in stretches of T::depth columns, each with all rows.
  void read_queries() {
    const float scale = c_.options.scale_for(dim_);
    fill(q_, padded_ * sizes_.q, 0.f);
    for (int r = 0; r < count_; ++r) {
      const int64_t token = token_of(r), from = head_of(r) * dim_;
      const int64_t stretch = few_ ? dim_ : T::depth;
      for (int64_t col = 0; col < dim_; col += stretch) {
        float* const to = few_ ? q_ + r * sizes_.q : q_ + col * padded_ + r * T::depth;
        const int64_t cols = lesser(stretch, dim_ - col);
        read_row(c_.q, token, from + col, cols, to);
        for (int64_t i = 0; i < cols; ++i) to[i] *= scale;
      }
      if (few_) {
        each_stretch<KeyStretch>(dim_, [&](int64_t col) {
          float in_order[KeyStretch::cols];
          copy_bytes<int(sizeof(in_order))>(in_order, q_ + r * sizes_.q + col);
          for (int i = 0; i < KeyStretch::cols; ++i)
            q_[r * sizes_.q + col + i] = in_order[KeyStretch::column(i)] * KeyStretch::worth;
        });
      }
    }
  }
  // Moves the columns of the output from the order in which values are decoded to that of their rows.
  void put_in_order() {
    for (int r = 0; r < count_; ++r) {
      each_stretch<ValueStretch>(v_dim_, [&](int64_t col) {
        alignas(64) float sums[ValueStretch::cols], in_order[ValueStretch::cols];
        for (int i = 0; i < ValueStretch::cols; i += N)
          put_vector<float>(sums + i, vector_at(at_column(r, int(col) + i)));
        for (int i = 0; i < ValueStretch::cols; ++i) in_order[ValueStretch::column(i)] = sums[i] * ValueStretch::worth;
        for (int i = 0; i < ValueStretch::cols; i += N)
          put_vector<float>(at_column(r, int(col) + i), vector_at(in_order + i));
      });
    }
  }

  // Collects the addresses and scales of a tile of keys from `begin` on, with all heads of a position side by side.
  // Returns the number of keys.
  int gather_keys(int64_t begin, int64_t end) {
    const int keys = int(lesser<int64_t>(sizes_.keys, greater<int64_t>(0, end - begin)));
    keys_.gather(begin, keys, [&](int64_t pos) {
      return [this, at = keys_at(c_.kv, part_.b, pos)](int64_t head) KERNELS_INLINE { return at(part_.head + head); };
    });
    return keys;
  }
  void gather_values(int64_t begin, int keys) {
    values_.gather(begin, keys, [&](int64_t pos) {
      return [this, at = values_at(c_.kv, part_.b, pos)](int64_t head) KERNELS_INLINE { return at(part_.head + head); };
    });
  }

  // ---- a tile of keys ----------------------------------------------------------------------------------------------

  // Turns the logits of a row into weights: applies the score, and subtracts the largest logit so far.
  void weigh(int r, int64_t begin, int keys) {
    float* const weights = weights_ + r * weights_stride_;
    const int low = int(greater<int64_t>(0, ranges_[r].begin - begin)),
              high = int(lesser<int64_t>(keys, ranges_[r].end - begin));
    if (low >= high) {
      fill(weights, keys, 0.f);
      return;
    }
    const float* const key_scales = keys_.scales(r / each_);
    const float* const value_scales = values_.scales(r / each_);
    ScoreAt at{part_.b, head_of(r), query_of(r), begin, q_len_, kv_len_};
    Register<float> most = in_register(broadcast<N>(-infinity<float>()));
    for (int key = 0; key < keys; key += N) {
      float* const logits = in_panel(logits_, r, key);
      Pack<float, N> v = pack_at<N>(logits);
      if constexpr (KeyRun::scaled) v = v * pack_at<N>(key_scales + key);
      at.key = begin + key;
      if constexpr (score_transforms<S>) {
        if (key + N <= keys) {
          v = transform_logits(c_.score, v, at);
        } else {
          for (int i = 0; key + i < keys; ++i, ++at.key)
            v.v[i] = transform_logits(c_.score, Pack<float, 1>{{v.v[i]}}, at).v[0];
        }
      }
      if (key < low || key + N > high) {
        v = as_pack<float>(only_lanes(in_register(v), low - key, high - key, std::make_integer_sequence<int, N>()));
      }
      if constexpr (score_masks<S>) {
        for (int i = greater(0, low - key); i < lesser(N, high - key); ++i) {
          at.key = begin + key + i;
          if (!key_visible(c_.score, at)) v.v[i] = -infinity<float>();
        }
      }
      most = larger<float>(most, in_register(v));
      copy_bytes<int(sizeof(v.v))>(logits, v.v);
    }

    SoftmaxState<float>& state = states_[r];
    const float factor = state.raise(max_of(as_pack<float>(most))), reference = state.reference();
    Register<float> sum{};
    for (int key = 0; key < keys; key += N) {
      Pack<float, N> p = exp_minus(pack_at<N>(in_panel(logits_, r, key)), reference);
      sum = sum + in_register(p);
      if constexpr (ValueRun::scaled) p = p * pack_at<N>(value_scales + key);
      copy_bytes<int(sizeof(p.v))>(weights + key, p.v);
    }
    state.l += kernels::sum(as_pack<float>(sum));
    if (factor != 1) {
      for (int64_t col = 0; col < sizes_.o; col += N)
        put_vector<float>(at_column(r, int(col)), vector_at(at_column(r, int(col))) * factor);
    }
  }

  // ---- few rows ----------------------------------------------------------------------------------------------------

  // Calls f(rows, their distance, index of the first, count) for rows [first, first + count) of a tile, readable in
  // vectors: rows that are not are copied first, kDecoded at a time. Memory behind the last row is readable up to a
  // multiple of N.
  template <class Source, class F>
  void in_vectors(const Source& source, int first, int count, int64_t cols, const F& f) const {
    if (source.in_vectors()) return f(&source[first], source.stride(), first, count);
    using Plain = RowAt<DirectLoad<float>>;
    const int64_t stride = Sizes::padded(cols);
    for (const int end = first + count; first < end; first += kDecoded) {
      Room<Plain, kDecoded> rows;
      for (int i = 0; i < kDecoded; ++i) {
        if (first + i < end) {
          read_row(source, first + i, 0, cols, rows_ + i * stride);
          fill(rows_ + i * stride + cols, stride - cols, 0.f);
        }
        new (rows.at(i)) Plain({rows_, stride}, first + i < end ? i : 0);
      }
      f(static_cast<const Plain*>(rows.at(0)), 1, first, lesser(kDecoded, end - first));
    }
  }

  // Calls f(head, first, count, ahead) for all blocks of a tile's keys and all heads, in the order of memory. While one
  // block is processed, the next one is prefetched: from the same rows, and after them from the `more` rows of `next`.
  template <class Runs, class Next, class F>
  void in_blocks(const Runs& runs, int64_t cols, int keys, const Next& next, int64_t next_cols, int more,
                 const F& f) const {
    const Ahead last = next.ahead(0, heads_ * lesser(kBlockKeys, more), next_cols, cols);
    for (int first = 0; first < keys; first += kBlockKeys) {
      const int next_first = first + kBlockKeys, count = lesser(kBlockKeys, keys - first);
      Ahead ahead = last;
      if (next_first < keys)
        ahead = runs.ahead(heads_ * next_first, heads_ * lesser(next_first + kBlockKeys, keys), cols, cols);
      for (int head = 0; head < heads_; ++head) f(head, first, count, ahead.from(head * count));
    }
  }

  void few_logits(int keys) {
    in_blocks(keys_, dim_, keys, values_, v_dim_, keys, [&](int head, int first, int count, const Ahead& ahead) {
      in_vectors(keys_.of(head), first, count, dim_, [&](const auto* rows, int apart, int from, int some) {
        dot_rows(rows, apart, head * each_, from, some, ahead.from(from - first));
      });
    });
  }
  template <class Codes>
  void dot_rows(const RowAt<Codes>* rows, int apart, int first_row, int first, int keys, const Ahead& ahead) {
    for (int r = 0; r < each_;) {
      const int left = each_ - r;
      const auto some = [&](auto k, auto tokens) {
        dot_some<k(), tokens()>(rows, apart, first, keys, first_row + r, r == 0 ? ahead : Ahead{});
        r += tokens();
      };
      if (left >= 3 && N >= 8) some(Width<N / 4>{}, Width<4>{});
      else if (left >= 2) some(Width<N / 2>{}, Width<2>{});
      else some(Width<N>{}, Width<1>{});
    }
  }
  // After a head's last query come the next head's first one, whose logits are overwritten later, or a row whose
  // results are not used.
  template <int kKeys, int kTokens, class Codes>
  void dot_some(const RowAt<Codes>* rows, int apart, int first, int keys, int r, const Ahead& ahead) {
    // If a key's prefetch is long, it is spread over the products.
    constexpr bool kSpread = kKeys * Addressable<Codes>::bits >= 128;
    [[maybe_unused]] const int64_t each = dim_ / kKeys;
    for (int key = 0; key < keys; key += kKeys) {
      Register<float> lanes[kKeys * kTokens];
      int asked = 0;
      const auto ask = [&](int64_t col) KERNELS_INLINE {
        for (; asked < kKeys && asked * each <= col; ++asked) ahead(key + asked);
      };
      if constexpr (!kSpread) ask(dim_);
      dots<kKeys, kTokens>(rows + key * apart, apart, dim_, q_ + r * sizes_.q, sizes_.q, lanes,
                           [&](int64_t col) KERNELS_INLINE {
                             if constexpr (kSpread) ask(col);
                           });
      if constexpr (kSpread) ask(dim_);
      const auto sums = sums_of<float>(lanes);
      float* const to = in_panel(logits_, r, first + key);
      for (int t = 0; t < kTokens; ++t) copy_bytes<int(kKeys * sizeof(float))>(to + t * T::cols, sums.v + t * kKeys);
    }
  }

  void few_values(int keys, int more) {
    in_blocks(values_, v_dim_, keys, keys_, dim_, more, [&](int head, int first, int count, const Ahead& ahead) {
      in_vectors(values_.of(head), first, count, v_dim_, [&](const auto* rows, int apart, int from, int some) {
        add_rows(rows, apart, head * each_, from, some, ahead.from(from - first));
      });
    });
  }
  template <class Codes>
  void add_rows(const RowAt<Codes>* v, int apart, int first_row, int first, int keys, const Ahead& ahead) {
    constexpr int stretch = DecodedStretch<Codes>::vectors;
    int64_t col = 0;
    each_stretch<DecodedStretch<Codes>>(v_dim_, [&](int64_t begin) {
      unrolled<stretch / 4>([&](auto part) {
        const int64_t from = begin + part() * 4 * N;
        add_some<4, N, part() * 4>(v, apart, first_row, first, keys, from, ahead.part(from, from + 4 * N));
      });
      col = begin + stretch * N;
    });
    const auto add = [&](auto vectors, auto width) {
      const int64_t end = col + vectors() * width();
      add_some<vectors(), width(), -1>(v, apart, first_row, first, keys, col, ahead.part(col, end));
      col = end;
    };
    while (col + 4 * N <= v_dim_) add(Width<4>{}, Width<N>{});
    while (col + N <= v_dim_) add(Width<1>{}, Width<N>{});
    if (col < v_dim_) add(Width<1>{}, Width<kTail>{});
  }
  template <int kVectors, int kWidth, int kOfStretch, class Codes>
  void add_some(const RowAt<Codes>* v, int apart, int first_row, int first, int keys, int64_t col,
                const Ahead& all_ahead) const {
    // As many sums as there are registers for, of up to four rows, for which each value is decoded once. Instructions
    // of decode() with AVX2, 32 heads over 8 of 128 columns, relative to two rows at a time (here and in dot_rows()):
    // floats 0.85, halves 0.98, int8 0.94, e4m3 0.84, int4 0.88.
    constexpr int kSums = N >= 16 ? 16 : 8;
    for (int r = 0; r < each_;) {
      const float* const p = weights_ + (first_row + r) * weights_stride_ + first;
      const auto add = [&](auto rows) {
        constexpr int vectors = kVectors * rows() > kSums ? kSums / rows() : kVectors;
        unrolled<kVectors / vectors>([&](auto part) {
          constexpr int before = part() * vectors;
          float* o[vectors];
          for (int i = 0; i < vectors; ++i) o[i] = at_column(first_row + r, int(col) + (before + i) * N);
          const Ahead ahead = r == 0 && before == 0 ? all_ahead : Ahead{};
          add_values<rows(), vectors, kWidth, kOfStretch < 0 ? -1 : kOfStretch + before>(
              v, apart, keys, col + before * N, p, weights_stride_, o, T::cols,
              [&](int key) KERNELS_INLINE { ahead(key); });
        });
        r += rows();
      };
      const int left = each_ - r;
      if (left >= 4) add(Width<4>{});
      else if (left >= 2) add(Width<2>{});
      else add(Width<1>{});
    }
  }

  // ---- many rows ---------------------------------------------------------------------------------------------------

  // Whether any row of a tile sees any of these keys.
  bool any_sees(int first, int64_t begin, int keys) const {
    for (int r = first; r < lesser(first + T::rows, count_); ++r) {
      if (ranges_[r].begin < begin + keys && ranges_[r].end > begin) return true;
    }
    return false;
  }

  // Prefetches part `step` of `steps` of a tile's rows.
  template <class Source>
  static void prefetch(const Source& source, int count, int64_t cols, int step, int steps) {
    for (int i = count * step / steps; i < count * (step + 1) / steps; ++i) source.prefetch(i, 0, cols);
  }

  // Values are prefetched while logits are summed.
  void many_logits(int64_t begin, int keys) {
    const int64_t depth = Sizes::padded(dim_);
    const auto v = values_.of(0);
    in_vectors(keys_.of(0), 0, keys, dim_, [&](const auto* rows, int, int first, int count) {
      for (int key = first; key < first + count; key += N)
        transpose_keys(rows + (key - first), transposed_keys_ + key / T::cols * depth * T::cols + key % T::cols);
    });
    const int steps = (keys + T::cols - 1) / T::cols * (padded_ / T::rows);
    int step = 0;
    for (int key = 0; key < keys; key += T::cols) {
      const float* const panel = transposed_keys_ + key * depth;
      for (int r = 0; r < count_; r += T::rows) {
        prefetch(v, keys, v_dim_, step++, steps);
        if (!any_sees(r, begin + key, T::cols)) continue;
        for (int64_t col = 0; col < dim_; col += T::depth) {
          const int stretch = int(lesser<int64_t>(T::depth, dim_ - col));
          multiply_rows<T::rows>(lesser(T::rows, count_ - r), q_ + col * padded_ + r * T::depth, panel + col * T::cols,
                                 stretch, col == 0, in_panel(logits_, r, key), [](int) {});
        }
      }
    }
  }
  // Transposes N keys: side by side for each column.
  template <class Codes>
  void transpose_keys(const RowAt<Codes>* rows, float* to) const {
    int64_t col = 0;
    for (; col + N <= dim_; col += N) turn<N>(rows, col, to + col * T::cols, std::make_integer_sequence<int, N>());
    if (col < dim_) turn<kTail>(rows, col, to + col * T::cols, std::make_integer_sequence<int, N>());
  }
  template <int kWidth, class Codes, int... i>
  static KERNELS_INLINE void turn(const RowAt<Codes>* rows, int64_t col, float* to,
                                  std::integer_sequence<int, i...> lanes) {
    Register<float> square[] = {vector_of<kWidth>(rows[i], col)...};
    transpose<1, float>(square, lanes);
    (put_vector<float>(to + i * T::cols, square[i]), ...);
  }

  // The `more` keys of the next tile are prefetched while values are added.
  void many_values(int64_t begin, int keys, int more) {
    const auto next = keys_.of(0);
    in_vectors(values_.of(0), 0, keys, v_dim_, [&](const auto* rows, int, int first, int count) {
      for (int key = first; key < first + count; ++key) {
        const auto& row = rows[key - first];
        const auto at = [&](int64_t col) {
          return transposed_values_ + col / T::cols * keys * T::cols + key * T::cols + col % T::cols;
        };
        int64_t col = 0;
        for (; col + N <= v_dim_; col += N) put_vector<float>(at(col), vector_of<N>(row, col));
        if (col < v_dim_) put_vector<float>(at(col), vector_of<kTail>(row, col)), col += N;
        for (; col < sizes_.o; col += N) put_vector<float>(at(col), Register<float>{});
      }
    });
    const int steps = int(sizes_.o / T::cols) * (padded_ / T::rows);
    int step = 0;
    for (int64_t col = 0; col < sizes_.o; col += T::cols) {
      for (int r = 0; r < count_; r += T::rows) {
        if (more > 0) prefetch(next, more, dim_, step, steps);
        ++step;
        if (!any_sees(r, begin, keys)) continue;
        multiply_rows<T::rows>(lesser(T::rows, count_ - r), weights_ + r * weights_stride_,
                               transposed_values_ + col * keys, keys, false, at_column(r, int(col)), [](int) {});
      }
    }
  }

  // ---- results -----------------------------------------------------------------------------------------------------

  // Writes a row's output: o(Width, col) are its sums, normalized by its state.
  template <class Sums>
  void write(int r, const Sums& o, const SoftmaxState<float>& state) const {
    const int64_t token = token_of(r), head = head_of(r), first = head * v_dim_;
    const float inverse = state.inverse();
    const auto map = sink_map(c_.out);
    const auto& end = sink_end(c_.out);
    const Packs<DirectLoad<float>, Out> packs({nullptr, 0}, c_.out, v_dim_);
    packs.each(first, first + v_dim_, [&](auto width, int64_t col) KERNELS_INLINE {
      put_mapped(end, map, o(width, col - first) * inverse, token, col);
    });
    c_.options.write_lse(state.logsumexp(), token, head, c_.shape.heads);
  }

  const Call& c_;
  AttentionPart part_;
  Sizes sizes_;
  bool few_;
  int heads_, each_, count_, padded_;  // each_: rows of each kv head
  int64_t group_, dim_, v_dim_;
  int weights_stride_;
  int64_t q_len_ = 0, kv_len_ = 0;
  float *q_, *o_, *logits_, *weights_, *transposed_keys_, *transposed_values_, *rows_;
  SoftmaxState<float> states_[kMostRows];
  KeyRange ranges_[kMostRows];
  GatheredRuns<KeyRun> keys_;
  GatheredRuns<ValueRun> values_;
  alignas(64) float memory_[kAttentionFloats];
};

}  // namespace host
}  // namespace detail
KERNELS_END
