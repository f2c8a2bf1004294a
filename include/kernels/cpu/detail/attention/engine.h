// Attention on the CPU: o = softmax(q k^T) v, tile by tile of the keys, with the state of core/softmax_state.h for each row.
//
// A row is a query of a head. The rows of all heads that share keys, and of a few queries or many, are worked on together by
// one thread, so that keys and values are read once for all of them. Of each tile of keys: the logits, what the score makes of
// them, their weights under the largest logit so far, and the values times the weights on top of the output, which shrinks
// whenever a larger logit turns up. Few rows multiply with keys and values as they lie in memory (as in gemv.h), many with
// tiles that are turned around first (as in gemm.h). Everything is on the stack.
//
// Few rows of several heads of keys take turns tile by tile, so that keys are read in the order of memory.
//
// Decoding cuts long sequences into splits, whose states go through a workspace and are merged in order. Cuts and tiles depend
// on lengths and shape alone, never on threads or on what else is in the batch.
#pragma once

#include <atomic>
#include <new>

#include "../../../heads.h"
#include "../../../kv.h"
#include "../../../score.h"
#include "../matmul/gemm.h"
#include "../matmul/gemv.h"

KERNELS_BEGIN
namespace detail {
namespace host {

// Rows up to this number are multiplied without turning keys and values around.
constexpr int kFewRows = 8;
// Heads of keys that are worked on together, of few rows: as they usually lie side by side, memory is read in long stretches.
constexpr int kHeadsPerItem = 8;
// Keys of a tile, of few rows and of many; of many rows with a larger head, fewer. Of few rows the next tile is on its way to the
// second-level cache meanwhile. On an EPYC with AVX-512, one thread, halves, 8 key heads of 128, as a share of a plain read with 8 and
// with 32 query heads: one head at a time 0.74 and 0.46, 8 together 0.87 and 0.52, then with 32 keys 0.83 and 0.50.
constexpr int kFewRowsKeys = 64, kManyRowsKeys = 128;
constexpr int kMostTileKeys = kFewRowsKeys * kHeadsPerItem > kManyRowsKeys ? kFewRowsKeys * kHeadsPerItem : kManyRowsKeys;
// What a thread has on its stack.
constexpr int kAttentionFloats = 104 << 10;
constexpr int kMostRows = 126;
// Splits of a sequence have at least so many keys; there are never more of them than that.
constexpr int64_t kSplitKeys = 512;
constexpr int kMostSplits = 16;

// ---- rows of keys or values ----------------------------------------------------------------------------------------

template <class Codes>
struct RowAt {
  Codes codes;
  int64_t row;
};

// Whether vectors may be read at multiples of 8 columns, wherever a row begins.
template <class Codes>
struct InVectors {
  static bool value(const Codes&) { return any_width<Codes>; }
};
template <class Format>
struct InVectors<Words<Format>> {
  static bool value(const Words<Format>&) { return true; }
};

// Rows from anywhere, as one source; they are `stride` apart.
template <class Codes>
class Gathered : public Functor {
 public:
  static constexpr Role role = Role::source;
  static constexpr int widest = widest_of<Codes>();
  explicit Gathered(const RowAt<Codes>* rows, int stride = 1) : rows_(rows), stride_(stride) {}

  int max_pack() const { return max_pack_of(rows_->codes); }
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const { return detail::fetch<N>((*this)[row].codes, (*this)[row].row, col); }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const {
    return detail::resolve((*this)[row].codes, fetched, (*this)[row].row, col);
  }
  void prefetch(int64_t row, int64_t begin, int64_t end) const { detail::prefetch((*this)[row].codes, (*this)[row].row, begin, end); }
  bool in_vectors() const { return InVectors<Codes>::value(rows_->codes); }
  KERNELS_HD const RowAt<Codes>& operator[](int64_t row) const { return rows_[row * stride_]; }
  int stride() const { return stride_; }

 private:
  const RowAt<Codes>* rows_;
  int stride_;
};
template <class Codes>
struct AnyWidth<Gathered<Codes>> {
  static constexpr bool value = any_width<Codes>;
};

// A vector of a row; of the last columns, kWidth of them and zeros.
template <int kWidth, class Codes>
KERNELS_INLINE inline Register<float> vector_of(const RowAt<Codes>& at, int64_t col) {
  constexpr int N = kLanes<float>;
  const auto some = convert<float>(resolve(at.codes, fetch<kWidth>(at.codes, at.row, col), at.row, col));
  if constexpr (kWidth == N) {
    return in_register(some);
  } else {
    Pack<float, N> all = broadcast<N>(0.f);
    for (int i = 0; i < kWidth; ++i) all.v[i] = some.v[i];
    return in_register(all);
  }
}
// Heads are multiples of 8 columns.
constexpr int kTail = kLanes<float> < 8 ? kLanes<float> : 8;

// v in lanes [low, high), -inf in the others.
template <int... i>
KERNELS_INLINE inline Register<float> only_lanes(const Register<float>& v, int low, int high, std::integer_sequence<int, i...>) {
#if KERNELS_VECTORS
  using Ints = VectorOf<int32_t, kLanes<float>>;
  const Ints lanes = {i...};
  return ((lanes >= low) & (lanes < high)) ? v : Register<float>{} - infinity<float>();
#else
  return {{(i >= low && i < high ? v.v[i] : -infinity<float>())...}};
#endif
}

// The products of kKeys rows, `apart` from each other, and kTokens of q, `stride` apart: sums[token * kKeys + key], lane by lane.
template <int kKeys, int kTokens, class Codes>
KERNELS_INLINE inline void dots(const RowAt<Codes>* rows, int apart, int64_t cols, const float* q, int64_t stride, Register<float>* sums) {
  constexpr int N = kLanes<float>;
  Register<float> so_far[kTokens][kKeys] = {};
  const auto step = [&](auto width, int64_t col) KERNELS_INLINE {
    Register<float> x[kTokens];
    unrolled<kTokens>([&](auto t) KERNELS_INLINE { x[t()] = vector_at(q + t() * stride + col); });
    unrolled<kKeys>([&](auto j) KERNELS_INLINE {
      const Register<float> y = vector_of<width()>(rows[j() * apart], col);
      unrolled<kTokens>([&](auto t) KERNELS_INLINE { so_far[t()][j()] = multiply_add<float>(x[t()], y, so_far[t()][j()]); });
    });
  };
  int64_t col = 0;
  for (; col + N <= cols; col += N) step(Width<N>{}, col);
  if (col < cols) step(Width<kTail>{}, col);
  unrolled<kTokens>([&](auto t) KERNELS_INLINE { unrolled<kKeys>([&](auto j) KERNELS_INLINE { sums[t() * kKeys + j()] = so_far[t()][j()]; }); });
}

// o + row * stride, kVectors of them, += the sum over keys, `apart` from each other, of p[row * p_stride + key] * the key's columns from
// `col` on.
template <int kRows, int kVectors, int kWidth, class Codes, class Ahead>
void add_values(const RowAt<Codes>* v, int apart, int keys, int64_t col, const float* p, int p_stride, float* const (&o)[kVectors], int stride, const Ahead& ahead) {
  constexpr int N = kLanes<float>;
  Register<float> sums[kRows][kVectors];
  unrolled<kRows>([&](auto r) KERNELS_INLINE { unrolled<kVectors>([&](auto i) KERNELS_INLINE { sums[r()][i()] = vector_at(o[i()] + r() * stride); }); });
  for (int key = 0; key < keys; ++key) {
    ahead(key);
    const auto& row = v[key * apart];
    unrolled<kVectors>([&](auto i) KERNELS_INLINE {
      const Register<float> values = vector_of<kWidth>(row, col + i() * N);
      unrolled<kRows>([&](auto r) KERNELS_INLINE { sums[r()][i()] = multiply_add<float>(in_register(broadcast<N>(p[r() * p_stride + key])), values, sums[r()][i()]); });
    });
  }
  unrolled<kRows>([&](auto r) KERNELS_INLINE { unrolled<kVectors>([&](auto i) KERNELS_INLINE { put_vector<float>(o[i()] + r() * stride, sums[r()][i()]); }); });
}

// ---- one thread's rows ---------------------------------------------------------------------------------------------

template <class Q, class Kv, class S, class Out>
struct AttentionCall {
  const Q& q;
  const Kv& kv;
  const S& score;
  const Out& out;
  const AttentionShape& shape;
  const Attention& options;
};

// Rows [first, first + count) of a sequence, of the heads that read each of the `heads` kv heads from `head` on, and keys [begin, end).
// Row r is query r / group of head r % group among them.
struct AttentionPart {
  int64_t b, head, heads, first, count, begin, end;
};

template <class Call>
class AttentionRows;
template <class Q, class Kv, class S, class Out>
class AttentionRows<AttentionCall<Q, Kv, S, Out>> {
  using Call = AttentionCall<Q, Kv, S, Out>;
  using T = Tiles<float>;
  using KeyRun = std::decay_t<decltype(std::declval<const Kv&>().key(kAny, kAny, kAny))>;
  using ValueRun = std::decay_t<decltype(std::declval<const Kv&>().value(kAny, kAny, kAny))>;
  using Key = RowAt<typename KeyRun::Codes>;
  using Value = RowAt<typename ValueRun::Codes>;
  static constexpr int N = kLanes<float>;

 public:
  // How many rows are worked on together.
  static int64_t most_rows(const AttentionShape& shape) {
    const Sizes s(shape, kMostRows);
    const int64_t rows = (kAttentionFloats - s.shared) / s.each / T::rows * T::rows;
    return lesser<int64_t>(rows, kMostRows / T::rows * T::rows);
  }

  AttentionRows(const Call& call, const AttentionPart& part)
      : c_(call), part_(part), sizes_(call.shape, part.count), few_(part.count <= kFewRows), heads_(int(part.heads)), each_(int(part.count)),
        count_(heads_ * each_), padded_((count_ + T::rows - (few_ ? 0 : 1)) / T::rows * T::rows), group_(call.shape.group()), dim_(call.shape.dim),
        v_dim_(call.shape.value_dim()), weights_stride_(few_ ? kFewRowsKeys : T::depth) {
    float* at = memory_;
    const auto take = [&at](int64_t floats) { float* const p = at; at += floats; return p; };
    q_ = take(padded_ * sizes_.q);
    o_ = take(padded_ * sizes_.o);
    logits_ = take(padded_ * sizes_.keys);
    weights_ = take(padded_ * weights_stride_);
    turned_keys_ = take(sizes_.turned_keys);
    turned_values_ = take(sizes_.turned_values);
    rows_ = take(sizes_.rows);
  }

  void run() {
    q_len_ = c_.shape.queries(part_.b);
    kv_len_ = c_.kv.length(part_.b);
    read_queries();
    fill(o_, padded_ * sizes_.o, 0.f);
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
  }

  // The results of whole rows.
  void finish() {
    for (int r = 0; r < count_; ++r) {
      SoftmaxState<float> state = states_[r];
      float scale = 1;
      if constexpr (score_sinks<S>) scale = state.merge(sink_state(c_.score, head_of(r))).mine;
      write(r, [&](auto width, int64_t col) KERNELS_INLINE { return pack_at<width()>(at_column(r, int(col))) * scale; }, state);
    }
  }

  // The states of a part, as floats: m, l and o of each row.
  static int64_t state_floats(const AttentionShape& shape) { return shape.value_dim() + 2; }
  // Those of a kv head, `stride` floats behind those of the one before.
  void save(float* first, int64_t stride) const {
    for (int r = 0; r < count_; ++r) {
      float* const to = first + r / each_ * stride + r % each_ * state_floats(c_.shape);
      to[0] = states_[r].m, to[1] = states_[r].l;
      for (int64_t col = 0; col < v_dim_; col += 8) copy_bytes<32>(to + 2 + col, at_column(r, int(col)));
    }
  }
  // The results of rows whose keys were cut into parts, `stride` floats apart.
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
  // In floats: of each row, and of all together.
  struct Sizes {
    int64_t keys, q, o, turned_keys = 0, turned_values = 0, rows, each, shared;
    Sizes(const AttentionShape& shape, int64_t count) {
      const int64_t dim = shape.dim, v_dim = shape.value_dim(), panels = (v_dim + T::cols - 1) / T::cols * T::cols;
      const bool few = count <= kFewRows;
      keys = few ? kFewRowsKeys : greater(dim, v_dim) <= 128 ? kManyRowsKeys : greater(dim, v_dim) <= 256 ? kManyRowsKeys / 2 : kManyRowsKeys / 4;
      q = few ? padded(dim) + kRowGap : (dim + T::depth - 1) / T::depth * T::depth;
      o = panels;
      if (!few) turned_keys = keys * padded(dim), turned_values = keys * panels;
      rows = (N > kDecoded ? N : kDecoded) * padded(greater(dim, v_dim));
      each = q + o + keys + (few ? kFewRowsKeys : T::depth);
      shared = turned_keys + turned_values + rows;
    }
    static int64_t padded(int64_t dim) { return (dim + kPadding - 1) / kPadding * kPadding; }
  };

  int64_t query_of(int r) const { return (part_.first + r % each_) / group_; }
  int64_t head_of(int r) const { return (part_.head + r / each_) * group_ + (part_.first + r % each_) % group_; }
  int64_t token_of(int r) const { return c_.shape.first_query(part_.b) + query_of(r); }

  template <int M>
  static KERNELS_INLINE Pack<float, M> pack_at(const float* from) {
    Pack<float, M> v;
    copy_bytes<int(sizeof(v.v))>(v.v, from);
    return v;
  }

  // Panels of T::cols columns, or keys, with all rows in each.
  float* in_panel(float* panels, int r, int i) const { return panels + (int64_t(i / T::cols) * padded_ + r) * T::cols + i % T::cols; }
  float* at_column(int r, int col) const { return in_panel(o_, r, col); }

  // ---- queries and keys --------------------------------------------------------------------------------------------

  // With the scale. Of many rows in stretches of T::depth columns, each with all rows.
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
    }
  }

  // Where a tile of keys from `begin` on is, and what they are scaled with: those of all heads at a position side by side. How many
  // there are.
  int gather_keys(int64_t begin, int64_t end) {
    const int keys = int(lesser<int64_t>(sizes_.keys, greater<int64_t>(0, end - begin)));
    gather<KeyRun>([&](int64_t head, int64_t pos) { return c_.kv.key(part_.b, head, pos); }, begin, keys, keys_.at(0), key_scales_, key_places_);
    return keys;
  }
  void gather_values(int64_t begin, int keys) {
    gather<ValueRun>([&](int64_t head, int64_t pos) { return c_.kv.value(part_.b, head, pos); }, begin, keys, values_.at(0), value_scales_, value_places_);
  }
  template <class Run, class At>
  void gather(const At& at, int64_t begin, int count, RowAt<typename Run::Codes>* rows, float* scales, const char** places) {
    for (int head = 0; head < heads_; ++head, ++rows, ++places, scales += sizes_.keys) {
      int i = 0;
      while (i < count) {
        const Run run = at(part_.head + head, begin + i);
        const int end = int(lesser<int64_t>(count, i + run.count)), from = i;
        for (; i < end; ++i) {
          new (rows + i * heads_) RowAt<typename Run::Codes>{run.codes, i - from};
          if constexpr (Place<typename Run::Codes>::bits > 0) places[i * heads_] = Place<typename Run::Codes>::of(run.codes, i - from, 0);
          if constexpr (Run::scaled) scales[i] = run.scale(i - from);
        }
      }
      // Whole vectors of keys are multiplied: the last one stands in for those that lack.
      for (; i > 0 && i % N != 0; ++i) new (rows + i * heads_) RowAt<typename Run::Codes>(rows[(i - 1) * heads_]);
    }
  }
  auto keys_of(int head) { return Gathered<typename KeyRun::Codes>(keys_.at(head), heads_); }
  auto values_of(int head) { return Gathered<typename ValueRun::Codes>(values_.at(head), heads_); }

  // ---- a tile of keys ----------------------------------------------------------------------------------------------

  // Logits of a row: their score, and their weights under the largest so far.
  void weigh(int r, int64_t begin, int keys) {
    float* const weights = weights_ + r * weights_stride_;
    const int low = int(greater<int64_t>(0, ranges_[r].begin - begin)), high = int(lesser<int64_t>(keys, ranges_[r].end - begin));
    if (low >= high) {
      fill(weights, keys, 0.f);
      return;
    }
    const float* const key_scales = key_scales_ + r / each_ * sizes_.keys;
    const float* const value_scales = value_scales_ + r / each_ * sizes_.keys;
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
          for (int i = 0; key + i < keys; ++i, ++at.key) v.v[i] = transform_logits(c_.score, Pack<float, 1>{{v.v[i]}}, at).v[0];
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
      for (int64_t col = 0; col < sizes_.o; col += N) put_vector<float>(at_column(r, int(col)), vector_at(at_column(r, int(col))) * factor);
    }
  }

  // ---- few rows ----------------------------------------------------------------------------------------------------

  // f(rows, how far apart they are, number of the first, how many) for all rows of a tile, such that they can be read in vectors: those
  // that cannot are copied first, kDecoded of them at a time. Behind the last row there is memory that may be read, up to a multiple
  // of N.
  static constexpr int kDecoded = 16;
  template <class Source, class F>
  void in_vectors(const Source& source, int count, int64_t cols, const F& f) const {
    if (source.in_vectors()) return f(&source[0], source.stride(), 0, count);
    using Plain = RowAt<DirectLoad<float>>;
    const int64_t stride = Sizes::padded(cols);
    for (int first = 0; first < count; first += kDecoded) {
      Room<Plain, kDecoded> rows;
      for (int i = 0; i < kDecoded; ++i) {
        if (first + i < count) {
          read_row(source, first + i, 0, cols, rows_ + i * stride);
          fill(rows_ + i * stride + cols, stride - cols, 0.f);
        }
        new (rows.at(i)) Plain{{rows_, stride}, first + i < count ? i : 0};
      }
      f(static_cast<const Plain*>(rows.at(0)), 1, first, lesser(kDecoded, count - first));
    }
  }

  // What comes into the cache meanwhile, keys or values, of all heads in the order of memory: each row that is worked on prefetches part of
  // another, `bytes` from its `begin` on.
  struct Ahead {
    const char* const* rows;
    int count;
    KERNELS_INLINE void operator()(int i, int64_t begin, int64_t bytes) const {
      if (i < count) prefetch_lines(rows[i] + begin, rows[i] + begin + bytes);
    }
  };
  template <class Codes>
  Ahead ahead(const char* const* rows, int first, int count) const { return {rows + first, Place<Codes>::bits > 0 ? count - first : 0}; }

  // While keys are read, values come into the cache.
  void few_logits(int keys) {
    for (int head = 0; head < heads_; ++head) {
      in_vectors(keys_of(head), keys, dim_, [&](const auto* rows, int apart, int first, int count) {
        dot_rows(rows, apart, head * each_, first, count, ahead<typename ValueRun::Codes>(value_places_, head * keys + first, heads_ * keys));
      });
    }
  }
  template <class Codes>
  void dot_rows(const RowAt<Codes>* rows, int apart, int first_row, int first, int keys, const Ahead& ahead) {
    for (int r = 0; r < each_;) {
      const int left = each_ - r;
      const auto some = [&](auto k, auto tokens) {
        dot_some<k(), tokens()>(rows, apart, first, keys, first_row + r, r == 0 ? ahead : Ahead{});
        r += tokens();
      };
      if (left >= 3 && N >= 16) some(Width<N / 4>{}, Width<4>{});
      else if (left >= 2) some(Width<N / 2>{}, Width<2>{});
      else some(Width<N>{}, Width<1>{});
    }
  }
  // Behind the last query of a head is the next head's first one, whose logits come later, or a row whose results are not used.
  template <int kKeys, int kTokens, class Codes>
  void dot_some(const RowAt<Codes>* rows, int apart, int first, int keys, int r, const Ahead& ahead) {
    const int64_t value_bytes = v_dim_ * Place<typename ValueRun::Codes>::bits / 8;
    for (int key = 0; key < keys; key += kKeys) {
      for (int i = key; i < key + kKeys; ++i) ahead(i, 0, value_bytes);
      Register<float> lanes[kKeys * kTokens];
      dots<kKeys, kTokens>(rows + key * apart, apart, dim_, q_ + r * sizes_.q, sizes_.q, lanes);
      const auto sums = sums_of<float>(lanes);
      for (int t = 0; t < kTokens; ++t) copy_bytes<int(kKeys * sizeof(float))>(in_panel(logits_, r + t, first + key), sums.v + t * kKeys);
    }
  }

  // While values are read, the next tile's keys come into the cache, `more` of them.
  void few_values(int keys, int more) {
    for (int head = 0; head < heads_; ++head) {
      in_vectors(values_of(head), keys, v_dim_, [&](const auto* rows, int apart, int first, int count) {
        add_rows(rows, apart, head * each_, first, count, ahead<typename KeyRun::Codes>(key_places_, head * keys + first, heads_ * more));
      });
    }
  }
  template <class Codes>
  void add_rows(const RowAt<Codes>* v, int apart, int first_row, int first, int keys, const Ahead& ahead) {
    int64_t col = 0;
    for (; col + 4 * N <= v_dim_; col += 4 * N) add_some<4, N>(v, apart, first_row, first, keys, col, ahead);
    for (; col + N <= v_dim_; col += N) add_some<1, N>(v, apart, first_row, first, keys, col, ahead);
    if (col < v_dim_) add_some<1, kTail>(v, apart, first_row, first, keys, col, ahead);
  }
  template <int kVectors, int kWidth, class Codes>
  void add_some(const RowAt<Codes>* v, int apart, int first_row, int first, int keys, int64_t col, const Ahead& all_ahead) const {
    float* o[kVectors];
    // The same part of a row of keys.
    constexpr int key_bits = Place<typename KeyRun::Codes>::bits;
    const int64_t from = col * dim_ / v_dim_ * key_bits / 8, bytes = (lesser(v_dim_, col + kVectors * kWidth) * dim_ / v_dim_ * key_bits / 8) - from;
    for (int r = 0; r < each_;) {
      for (int i = 0; i < kVectors; ++i) o[i] = at_column(first_row + r, int(col) + i * N);
      const float* const p = weights_ + (first_row + r) * weights_stride_ + first;
      const auto add = [&](auto rows) {
        const Ahead ahead = r == 0 ? all_ahead : Ahead{};
        add_values<rows(), kVectors, kWidth>(v, apart, keys, col, p, weights_stride_, o, T::cols, [&](int key) KERNELS_INLINE { ahead(key, from, bytes); });
        r += rows();
      };
      const int left = each_ - r;
      if (left >= 4 && N >= 16) add(Width<4>{});
      else if (left >= 2) add(Width<2>{});
      else add(Width<1>{});
    }
  }

  // ---- many rows ---------------------------------------------------------------------------------------------------

  // Whether any of the rows of a tile of rows see any of these keys.
  bool any_sees(int first, int64_t begin, int keys) const {
    for (int r = first; r < lesser(first + T::rows, count_); ++r) {
      if (ranges_[r].begin < begin + keys && ranges_[r].end > begin) return true;
    }
    return false;
  }

  // Asks for part `step` of `steps` of a tile's rows.
  template <class Source>
  static void prefetch(const Source& source, int count, int64_t cols, int step, int steps) {
    for (int i = count * step / steps; i < count * (step + 1) / steps; ++i) source.prefetch(i, 0, cols);
  }

  // While logits are summed, values come into the cache.
  void many_logits(int64_t begin, int keys) {
    const int64_t depth = Sizes::padded(dim_);
    const auto v = values_of(0);
    in_vectors(keys_of(0), keys, dim_, [&](const auto* rows, int, int first, int count) {
      for (int key = first; key < first + count; key += N) turn_keys(rows + (key - first), turned_keys_ + key / T::cols * depth * T::cols + key % T::cols);
    });
    const int steps = (keys + T::cols - 1) / T::cols * (padded_ / T::rows);
    int step = 0;
    for (int key = 0; key < keys; key += T::cols) {
      const float* const panel = turned_keys_ + key * depth;
      for (int r = 0; r < count_; r += T::rows) {
        prefetch(v, keys, v_dim_, step++, steps);
        if (!any_sees(r, begin + key, T::cols)) continue;
        for (int64_t col = 0; col < dim_; col += T::depth) {
          const int stretch = int(lesser<int64_t>(T::depth, dim_ - col));
          multiply_rows<T::rows>(lesser(T::rows, count_ - r), q_ + col * padded_ + r * T::depth, panel + col * T::cols, stretch, col == 0,
                                 in_panel(logits_, r, key), [](int) {});
        }
      }
    }
  }
  // N keys side by side for each column.
  template <class Codes>
  void turn_keys(const RowAt<Codes>* rows, float* to) const {
    int64_t col = 0;
    for (; col + N <= dim_; col += N) turn<N>(rows, col, to + col * T::cols, std::make_integer_sequence<int, N>());
    if (col < dim_) turn<kTail>(rows, col, to + col * T::cols, std::make_integer_sequence<int, N>());
  }
  template <int kWidth, class Codes, int... i>
  static KERNELS_INLINE void turn(const RowAt<Codes>* rows, int64_t col, float* to, std::integer_sequence<int, i...> lanes) {
    Register<float> square[] = {vector_of<kWidth>(rows[i], col)...};
    transpose<1, float>(square, lanes);
    (put_vector<float>(to + i * T::cols, square[i]), ...);
  }

  // While values are added, the next tile's keys come into the cache, `more` of them.
  void many_values(int64_t begin, int keys, int more) {
    const auto next = keys_of(0);
    in_vectors(values_of(0), keys, v_dim_, [&](const auto* rows, int, int first, int count) {
      for (int key = first; key < first + count; ++key) {
        const auto& row = rows[key - first];
        const auto at = [&](int64_t col) { return turned_values_ + col / T::cols * keys * T::cols + key * T::cols + col % T::cols; };
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
        multiply_rows<T::rows>(lesser(T::rows, count_ - r), weights_ + r * weights_stride_, turned_values_ + col * keys, keys, false,
                               at_column(r, int(col)), [](int) {});
      }
    }
  }

  // ---- results -----------------------------------------------------------------------------------------------------

  // o(Width, col): the sums of a row under its state.
  template <class Sums>
  void write(int r, const Sums& o, const SoftmaxState<float>& state) const {
    const int64_t token = token_of(r), head = head_of(r), first = head * v_dim_;
    const float inverse = state.inverse();
    const auto map = sink_map(c_.out);
    const auto& end = sink_end(c_.out);
    const Packs<DirectLoad<float>, Out> packs({nullptr, 0}, c_.out, v_dim_);
    packs.each(first, first + v_dim_, [&](auto width, int64_t col) KERNELS_INLINE {
      const auto v = o(width, col - first) * inverse;
      put(end, apply_map(map, v, fetch_operands<width()>(map, token, col), token, col), token, col);
    });
    c_.options.write_lse(state.logsumexp(), token, head, c_.shape.heads);
  }

  // Room for what has no default constructor.
  template <class Row, int kCount>
  struct Room {
    alignas(Row) unsigned char bytes[kCount * sizeof(Row)];
    Row* at(int64_t i) { return reinterpret_cast<Row*>(bytes) + i; }
  };

  const Call& c_;
  AttentionPart part_;
  Sizes sizes_;
  bool few_;
  int heads_, each_, count_, padded_;  // each_: rows of a kv head
  int64_t group_, dim_, v_dim_;
  int weights_stride_;
  int64_t q_len_ = 0, kv_len_ = 0;
  float *q_, *o_, *logits_, *weights_, *turned_keys_, *turned_values_, *rows_;
  SoftmaxState<float> states_[kMostRows];
  KeyRange ranges_[kMostRows];
  Room<Key, kMostTileKeys> keys_;
  Room<Value, kMostTileKeys> values_;
  const char *key_places_[kMostTileKeys], *value_places_[kMostTileKeys];
  float key_scales_[kMostTileKeys], value_scales_[kMostTileKeys];
  alignas(64) float memory_[kAttentionFloats];
};

// ---- all threads ---------------------------------------------------------------------------------------------------

// f(i) for all i below count, in any order, on so many threads.
template <class F>
void each_item(int64_t count, const Team& team, const F& f) {
  std::atomic<int64_t> next{0};
  parallel(team, int(greater<int64_t>(1, lesser<int64_t>(team.threads, count))), [&](int) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(i);
  });
}

// How the keys of a sequence are cut.
struct KeySplits {
  int64_t keys;
  int count;
  explicit KeySplits(int64_t length) {
    const int64_t least = (length + kMostSplits - 1) / kMostSplits;
    keys = greater(kSplitKeys, (least + kFewRowsKeys - 1) / kFewRowsKeys * kFewRowsKeys);
    count = int(greater<int64_t>(1, (length + keys - 1) / keys));
  }
};

template <class Q, class Out>
Status check_in_place(const Q& q, const Out& out, const AttentionShape& shape) {
  return ::kernels::detail::check_in_place(q, out, shape, shape.heads == shape.kv_heads, "out overlaps q, which takes as many kv_heads as heads");
}

// What only the CPU can check, as it sees the offsets: what the caller said of them.
inline Status check_queries(const AttentionShape& shape) {
  if (shape.q_offsets == nullptr) return {};
  for (int64_t b = 0; b < shape.batch; ++b) {
    if (shape.q_offsets[b] < 0 || shape.q_offsets[b + 1] < shape.q_offsets[b]) return invalid("q_offsets are negative or fall");
    if (shape.queries(b) > shape.q_len) return invalid("a sequence has more than q_len queries");
  }
  return {};
}

template <class Call>
class AttentionRun {
  using Rows = AttentionRows<Call>;

 public:
  explicit AttentionRun(const Call& call) : c_(call), group_(call.shape.group()), tile_(lesser(Rows::most_rows(c_.shape), c_.shape.q_len * group_)) {
    if (tile_ >= group_) tile_ = tile_ / group_ * group_;  // no query in two tiles
    tiles_ = (c_.shape.q_len * group_ + tile_ - 1) / tile_;
  }

  // Each item is a tile of rows with all of its keys. The last queries see the most: they come first.
  void whole(const Team& all_threads) const {
    const Team team = with_work(all_threads);
    const int64_t heads = heads_per_item(c_.shape.batch * tiles_, team.threads), groups = (c_.shape.kv_heads + heads - 1) / heads;
    each_item(c_.shape.batch * groups * tiles_, team, [&](int64_t i) {
      const int64_t each = c_.shape.batch * groups;
      const AttentionPart part = part_of(i % each / groups, i % groups * heads, heads, tiles_ - 1 - i / each);
      if (part.count <= 0) return;
      Rows rows(c_, part);
      rows.run();
      rows.finish();
    });
  }

  // Each item is a split of the keys; what comes of those of one tile of rows is merged when all are done.
  void split(const Team& all_threads, float* states) const {
    const Team team = with_work(all_threads);
    const int64_t all = c_.shape.batch * c_.shape.kv_heads * tiles_, row = Rows::state_floats(c_.shape), of_head = c_.shape.q_len * group_ * kMostSplits * row;
    const auto state_of = [&](const AttentionPart& part) {
      return states + (part.b * c_.shape.kv_heads + part.head) * of_head + part.first * kMostSplits * row;
    };
    int64_t splits_of_all = 0;
    for (int64_t b = 0; b < c_.shape.batch; ++b) splits_of_all += KeySplits(c_.kv.length(b)).count;
    const int64_t heads = heads_per_item(splits_of_all * tiles_, team.threads), groups = (c_.shape.kv_heads + heads - 1) / heads;
    // Heads take turns: what lies beside a head's keys has come into a cache with them.
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
  // Few queries are bound by reading keys and values, many by products.
  Team with_work(const Team& all) const {
    double keys = 0, products = 0;
    for (int64_t b = 0; b < c_.shape.batch; ++b) {
      keys += double(c_.kv.length(b));
      products += double(c_.kv.length(b)) * double(c_.shape.queries(b));
    }
    const double dims = double(c_.shape.dim + c_.shape.value_dim());
    return all.for_work(keys * double(c_.shape.kv_heads) * dims, products * double(c_.shape.heads) * dims);
  }
  // How many heads of keys make an item, where all of them would make `items`: fewer than kHeadsPerItem if threads had nothing to do.
  int64_t heads_per_item(int64_t items, int threads) const {
    int64_t heads = tile_ <= kFewRows ? kHeadsPerItem : 1;
    while (heads > 1 && threads > 1 && items * ((c_.shape.kv_heads + heads - 1) / heads) < 2 * threads) heads /= 2;
    return heads;
  }
  AttentionPart part_of(int64_t b, int64_t head, int64_t heads, int64_t tile) const {
    const int64_t first = tile * tile_;
    return {b, head, lesser(heads, c_.shape.kv_heads - head), first, lesser(tile_, c_.shape.queries(b) * group_ - first), 0, c_.kv.length(b)};
  }

  const Call& c_;
  int64_t group_, tile_, tiles_;
};

// ---- parts that are whole calls ------------------------------------------------------------------------------------

template <class O, class L, class Out>
void merge_states(const Team& team, const O& o, const L& lse, const Out& out, const MergeShape& shape, const Attention& options) {
  const auto map = sink_map(out);
  const auto& end = sink_end(out);
  const Packs<O, Out> packs(o, out, shape.dim);
  const int parts = int(lesser<int64_t>(team.threads, shape.tokens));
  parallel(team, parts, [&](int thread) {
    const int64_t last = shape.tokens / parts * (thread + 1) + shape.tokens % parts * (thread + 1) / parts;
    for (int64_t t = shape.tokens / parts * thread + shape.tokens % parts * thread / parts; t < last; ++t) {
      for (int64_t head = 0; head < shape.heads; ++head) {
        const auto logsumexp = [&](int64_t part) { return convert<float>(resolve(lse, fetch<1>(lse, part * shape.tokens + t, head), part * shape.tokens + t, head).v[0]); };
        SoftmaxState<float> all;
        for (int64_t part = 0; part < shape.parts; ++part) all.merge(AttentionState<float, 1>(logsumexp(part), {}));
        packs.each(head * shape.dim, (head + 1) * shape.dim, [&](auto width, int64_t col) KERNELS_INLINE {
          AttentionState<float, width()> sum;
          for (int64_t part = 0; part < shape.parts; ++part) {
            const int64_t row = part * shape.tokens + t;
            sum.merge({logsumexp(part), convert<float>(resolve(o, fetch<width()>(o, row, col), row, col))});
          }
          const auto v = sum.output();
          put(end, apply_map(map, v, fetch_operands<width()>(map, t, col), t, col), t, col);
        });
        options.write_lse(all.logsumexp(), t, head, shape.heads);
      }
    }
  });
}

}  // namespace host
}  // namespace detail
KERNELS_END
