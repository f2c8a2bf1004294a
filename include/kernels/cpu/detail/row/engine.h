// The row engine on the CPU. It runs the same row ops, sources, maps and sinks as the GPU engine.
//
// A row is reduced in blocks that fit into the first-level cache, each centered on its own state, in vectors (lanes.h).
// Between its two passes the row stays on the stack if it fits into kCachedBytes and if reading it again would cost
// more; it is stored centered if centering is expensive. While some rows are written, the next ones are prefetched. How
// a row is computed depends on cols only, so results do not depend on the number of threads.
#pragma once

#include <type_traits>

#include "../../../core/row_call.h"
#include "../../exec.h"
#include "packs.h"

KERNELS_BEGIN
namespace detail {
namespace host {

// Whether a source costs no more than reading memory, and may be read twice.
template <class Source>
struct IsDirectLoad : std::false_type {};
template <class Src, class Dst>
struct IsDirectLoad<DirectLoad<Src, Dst>> : std::true_type {};

constexpr int kBlockBytes = 16 << 10;
constexpr int kCachedBytes = 64 << 10;
constexpr int64_t kChunkCols = 16384;
constexpr int kMaxChunks = 64;
// Larger results are written with stores that bypass the cache.
constexpr int64_t kPastCacheBytes = 32ll << 20;
// A row of more columns would evict the prefetched next row.
constexpr int64_t kPrefetchedCols = 65536;
constexpr int kGroup = 4;
// Vectors that rows of up to this length share stay in the first-level cache anyway.
constexpr int64_t kShortCols = 2048;
// Values of a group of rows that are written, and prefetched of the next group, before the following columns.
constexpr int kStride = 2048;

// Packs that divide this number of columns divide all groups.
inline int64_t dividing_groups(int64_t cols, int64_t group) {
  return cols % kWidestPack == 0 && group % kWidestPack == 0 ? kWidestPack : 1;
}
// Writes a group of columns to a sink that sees its values before it writes them: value(Width<n>, col) is read in the
// first pass, again(Width<n>, col) in the second.
template <class Packs, class Sink, class Value, class Again>
void quantize_group(const Packs& packs, const Sink& sink, int64_t row, int64_t index, int64_t begin, int64_t end,
                    const Value& value, const Again& again) {
  typename Sink::State state{};
  packs.each(begin, end, [&](auto width, int64_t col) KERNELS_INLINE { state.take(value(width, col), col); });
  sink.write_scale(state, row, index);
  const float found = state.finish();
  constexpr int least = narrowest_of<Sink>();
  [[maybe_unused]] Pack<typename decltype(again(Width<1>{}, begin))::value_type, least> gathered;
  packs.each(begin, end, [&](auto width, int64_t col) KERNELS_INLINE {
    constexpr int N = decltype(width)::value;
    const auto v = again(width, col);
    if constexpr (N >= least) {
      sink.store(v, found, row, col);
    } else {
      const int at = int((col - begin) % least);
      for (int i = 0; i < N; ++i) gathered.v[at + i] = v.v[i];
      if (at + N == least) sink.store(gathered, found, row, col - at);
    }
  });
}

template <class Op_, class Source_, class Sink_>
struct RowProblem {
  using Op = Op_;
  using Source = Source_;
  using Sink = Sink_;
  using C = compute_type<Source>;
  static constexpr bool row_sink = is_row_sink<SinkEnd<Sink>>;
  static constexpr bool direct = IsDirectLoad<Source>::value;
  static constexpr bool reads_again = direct && Op::cheap_center && !row_sink;
  static constexpr int block = kBlockBytes / int(sizeof(C));
  static constexpr int64_t cached = kCachedBytes / int(sizeof(C));

  Op op;
  Source source;
  Sink sink;
  int64_t rows, cols;
  Packs<Source, Sink> packs;

  bool keeps_rows() const { return !reads_again && cols <= cached; }
  int blocks() const { return int((cols + block - 1) / block); }
  // The rows that a thread takes at a time, so that vectors that they share come into the first-level cache once. They
  // and the next group must fit into the cache.
  int group() const {
    if (cols <= kShortCols) return 1;
    if (keeps_rows()) return int(lesser<int64_t>(kGroup, cached / (blocks() * block)));
    return cols <= kPrefetchedCols / kGroup ? kGroup : cols <= kPrefetchedCols ? kGroup / 2 : 1;
  }
};

template <class P>
class RowEngine {
 public:
  explicit RowEngine(const P& problem)
      : p_(problem), again_(second_pass(p_.source)), map_(sink_map(p_.sink)), end_(sink_end(p_.sink)) {}

  void run(const Team& all) const {
    const Team team = all.for_work(double(p_.rows) * double(p_.cols));
    if (p_.cols > P::cached && p_.rows < team.threads) {
      for (int64_t row = 0; row < p_.rows; ++row) streamed_row(row, team);
      return;
    }
    const int parts = int(lesser<int64_t>(p_.rows, team.threads));
    parallel(team, parts, [&](int part) {
      const int64_t first = share_begin(p_.rows, part, parts), last = share_begin(p_.rows, part + 1, parts);
      rows_of_thread(first, last);
      fence_past_cache();
    });
  }

  using State = typename P::Op::State;
  // For a row that is not empty.
  State state(int64_t row) const { return reduce_chunks(row, Team{1}); }

 private:
  using C = typename P::C;
  using Op = typename P::Op;
  using Lanes = InLanes<Op>;
  static constexpr int N = kLanes<C>;
  using Vector = Pack<C, N>;

  // ---- blocks ------------------------------------------------------------------------------------------------------

  // Calls f(first column, number of columns) for the blocks of [begin, end).
  template <class F>
  static void each_block(int64_t begin, int64_t end, const F& f) {
    for (int64_t col = begin; col < end; col += P::block) f(col, int(lesser<int64_t>(P::block, end - col)));
  }

  // values[i] = f(Width<n>, begin + i) for the block's columns, in packs.
  template <class F>
  void fill(C* values, int64_t begin, int count, const F& f) const {
    p_.packs.each(begin, begin + count, [&](auto width, int64_t col) KERNELS_INLINE {
      const Pack<C, width()> v = f(width, col);
      put_pack(values + (col - begin), v);
    });
  }
  // Functors are copied into the callee of a loop: see Packs::run.
  template <class Source>
  auto reader(const Source& source, int64_t row) const {
    return [source, row](auto width, int64_t col) KERNELS_INLINE {
      return resolve(source, fetch<width()>(source, row, col), row, col);
    };
  }

  // Calls f(stream, i, n) for the vectors of `count` values: i is a vector's first value, n its number of values.
  // Streams are independent, so that their additions do not wait for one another.
  static constexpr int kStreams = 4;
  // The values in a chain of additions before its sum joins the others: in a long chain an outlier would make the
  // rounding error of every later addition as large as its own.
  static constexpr int kChain = 16 * kStreams * N;
  template <class F>
  static KERNELS_INLINE void each_vector(int count, const F& f) {
    int i = 0;
    for (; i + kStreams * N <= count; i += kStreams * N) {
      f(Width<0>{}, i, Width<N>{});
      f(Width<1>{}, i + N, Width<N>{});
      f(Width<2>{}, i + 2 * N, Width<N>{});
      f(Width<3>{}, i + 3 * N, Width<N>{});
    }
    for (; i + N <= count; i += N) f(Width<0>{}, i, Width<N>{});
    if (i < count) f(Width<0>{}, i, count - i);
  }
  // The n values at i; if n is less than a vector, followed by a neutral value.
  template <class Read>
  static KERNELS_INLINE Vector vector_at(const Read& read, int i, Width<N>, C) { return read(Width<N>{}, i); }
  template <class Read>
  static KERNELS_INLINE Vector vector_at(const Read& read, int i, int n, C neutral) {
    Vector v = broadcast<N>(neutral);
    for (int j = 0; j < n; ++j) v.v[j] = read(Width<1>{}, i + j).v[0];
    return v;
  }

  // The state of a block with values read(Width<n>, i). keep(i, Vector) receives them, centered if centering is
  // expensive.
  template <class Read, class Keep>
  KERNELS_INLINE State reduce(const Read& read, int count, const Keep& keep) const {
    State s;
    if constexpr (Lanes::by_largest) {
      Register<C> most[kStreams];
      for (auto& m : most) m = in_register(broadcast<N>(-infinity<C>()));
      each_vector(count, [&](auto stream, int i, auto n) KERNELS_INLINE {
        most[stream()] = larger<C>(most[stream()], in_register(vector_at(read, i, n, -infinity<C>())));
      });
      s = Lanes::open(max_of(as_pack<C>(larger<C>(larger<C>(most[0], most[1]), larger<C>(most[2], most[3])))));
    } else if constexpr (Lanes::by_first) {
      Pack<C, kFirst> first = broadcast<kFirst>(read(Width<1>{}, 0).v[0]);
      const int firsts = lesser(count, kFirst);
      int i = 0;
      for (; i + N <= firsts; i += N) put_pack(first.v + i, read(Width<N>{}, i));
      if (i < firsts) put_pack(first.v + i, vector_at(read, i, firsts - i, first.v[0]));
      s = Lanes::open(first, firsts);
    }
    for (bool again = false;; again = true) {
      const C neutral = Lanes::neutral(s);
      Register<C> all[Lanes::kSums] = {};
      for (int begin = 0; begin < count; begin += kChain) {
        Register<C> sums[kStreams][Lanes::kSums] = {};
        each_vector(lesser(kChain, count - begin), [&](auto stream, int i, auto n) KERNELS_INLINE {
          const Vector value = vector_at(read, begin + i, n, neutral), x = p_.op.center(value, s);
          keep(begin + i, Op::cheap_center ? value : x);
          Lanes::add(sums[stream()], x);
        });
        for (int k = 0; k < Lanes::kSums; ++k)
          all[k] = all[k] + ((sums[0][k] + sums[1][k]) + (sums[2][k] + sums[3][k]));
      }
      C totals[Lanes::kSums];
      for (int k = 0; k < Lanes::kSums; ++k) totals[k] = sum(as_pack<C>(all[k]));
      const State closed =
          Lanes::close(s, totals, count == P::block ? Count<C>(C(P::block), C(1.0 / P::block)) : Count<C>(count));
      if (again || !Lanes::recenter(s, closed)) return closed;
    }
  }

  // The same for the columns of a row from `begin` on. Values that must not be read twice go through `block`, which
  // keeps them, centered if centering is expensive, unless they are read again anyway.
  State reduce_block(int64_t row, int64_t begin, int count, C* block) const {
    const auto at = reader(p_.source, row);
    const auto keep = [&](int i, const Vector& x) KERNELS_INLINE {
      if constexpr (!P::reads_again && (P::direct || !Op::cheap_center)) put_pack(block + i, x);
    };
    if constexpr (P::direct) {
      return reduce([&](auto width, int i) KERNELS_INLINE { return at(width, begin + i); }, count, keep);
    } else {
      block[0] = C(0);  // g++ 12 does not see that fill() sets it
      fill(block, begin, count, at);
      return reduce([&](auto width, int i) KERNELS_INLINE { return pack_at<width()>(block + i); }, count, keep);
    }
  }
  void join(State& all, const State& next, bool first) const {
    if (first) all = next;
    else p_.op.merge(all, next);
  }
  auto finish_row(const State& all, int64_t row) const {
    const auto result = p_.op.finish(all, Count<C>(int(p_.cols)));
    p_.op.write_row(result, row);
    return result;
  }

  // Reads finished values of a row a second time; below, writes any row's finished values to the sink.
  template <class Map>
  auto read_again(const Map& map, int64_t row, const State& all, const Linear<C>& linear) const {
    return [at = reader(again_, row), op = p_.op, all, linear, map, row](auto width, int64_t col) KERNELS_INLINE {
      return mapped(map, linear(op.center(at(width, col), all)), row, col);
    };
  }
  template <class Value>
  void write(const Value& value, int64_t row, int64_t begin, int64_t end) const {
    const auto store = [value, sink = end_, row](auto width, int64_t col) KERNELS_INLINE {
      put(sink, value(width, col), row, col);
    };
    p_.packs.each(begin, end, store, lead_of(end_, row));
  }

  // Where a strip of columns begins or ends: at cache lines, unless a block or the row ends there.
  int64_t strip(int64_t col, int lead) const { return col % P::block == 0 ? col : lesser(p_.cols, col + lead % N); }

  // For a row sink: adds values to its state.
  template <class SinkState>
  void accumulate(SinkState& state, const C* values, int count) const {
    each_vector(count, [&](auto, int i, auto n) KERNELS_INLINE {
      const auto at = [&](auto width, int j) KERNELS_INLINE { return pack_at<width()>(values + j); };
      end_.accumulate(state, vector_at(at, i, n, end_.padding()), n);
    });
  }

  template <int M, class Map>
  static KERNELS_INLINE auto mapped(const Map& map, const Pack<C, M>& v, int64_t row, int64_t col) {
    return apply_map(map, v, fetch_operands<M>(map, row, col), row, col);
  }

  // ---- rows of one thread ------------------------------------------------------------------------------------------

  void rows_of_thread(int64_t first, int64_t last) const {
    if constexpr (!P::reads_again) {
      if (p_.keeps_rows()) return grouped_rows<true>(first, last);
    }
    if constexpr (P::row_sink) {
      for (int64_t row = first; row < last; ++row) streamed_row(row, Team{1});
    } else {
      grouped_rows<false>(first, last);
    }
  }

  // Rows that are kept (blocks wait centered, with their own state), or that are read again.
  template <bool kKept>
  void grouped_rows(int64_t first, int64_t last) const {
    constexpr int places = kKept ? P::cached / P::block : kGroup;
    alignas(64) C values[kKept ? P::cached : 1];
    State states[places];
    Linear<C> linears[places];
    const int group = p_.group(), blocks = p_.blocks();
    const auto kept = [&](int r) { return values + r * blocks * P::block; };
    for (int64_t row = first; row < last; row += group) {
      const int rows = int(lesser<int64_t>(group, last - row));
      for (int r = 0; r < rows; ++r) {
        if constexpr (kKept) {
          State all;
          each_block(0, p_.cols, [&](int64_t begin, int count) {
            C* const block = kept(r) + begin;
            State& state = states[r * blocks + begin / P::block];
            state = reduce_block(row + r, begin, count, block);
            join(all, state, begin == 0);
          });
          const auto result = finish_row(all, row + r);
          for (int b = r * blocks; b < (r + 1) * blocks; ++b) {
            if (Op::cheap_center) states[b] = all;
            linears[b] = p_.op.linear(states[b], result);
          }
        } else {
          states[r] = reduce_chunks(row + r, Team{1});
          linears[r] = p_.op.linear(states[r], finish_row(states[r], row + r));
        }
      }

      const auto finished = [&](int r, int64_t begin) {
        if constexpr (kKept) {
          const int b = r * blocks + int(begin / P::block);
          return [from = kept(r), at = row + r, map = map_, op = p_.op, state = states[b], linear = linears[b]](
                     auto width, int64_t col) KERNELS_INLINE {
            const auto value = pack_at<width()>(from + col);
            return mapped(map, linear(Op::cheap_center ? op.center(value, state) : value), at, col);
          };
        } else {
          return read_again(map_, row + r, states[r], linears[r]);
        }
      };
      if constexpr (P::row_sink) {
        for (int r = 0; r < rows; ++r) write_kept(kept(r), row + r, [&](int64_t begin) { return finished(r, begin); });
      } else {
        write_rows(row, rows, group, last, finished);
      }
    }
  }

  // Writes to a row sink through the buffer that keeps the row. finished(begin) returns how to read a block's finished
  // values.
  template <class Finished>
  KERNELS_INLINE void write_kept(C* values, int64_t row, const Finished& finished) const {
    typename decltype(end_)::State sink_state{};
    each_block(0, p_.cols, [&](int64_t begin, int count) {
      fill(values + begin, begin, count, finished(begin));
      if constexpr (!by_group<typename P::Sink>) accumulate(sink_state, values + begin, count);
    });
    if constexpr (by_group<typename P::Sink>) {
      const auto value = [from = values](auto width, int64_t col)
                             KERNELS_INLINE { return pack_at<width()>(from + col); };
      write_groups(row, Team{1}, value, value);
    } else {
      end_.write_row(sink_state, row);
      const auto result = end_.finish(sink_state);
      const auto store = [from = values, sink = end_, result, at = row](auto width, int64_t col)
                             KERNELS_INLINE { sink.store(pack_at<width()>(from + col), result, at, col); };
      p_.packs.each(0, p_.cols, store);
    }
  }

  // Writes to a sink that quantizes groups of columns, distributed among threads. value, again: as in quantize_group().
  template <class Value, class Again>
  void write_groups(int64_t row, const Team& team, const Value& value, const Again& again) const {
    const int group = end_.group();
    const Packs<typename P::Source, typename P::Sink> packs(p_.source, p_.sink, dividing_groups(p_.cols, group));
    parallel_shares(team, (p_.cols + group - 1) / group, [&](int64_t first, int64_t last) {
      for (int64_t index = first; index < last; ++index)
        quantize_group(packs, end_, row, index, index * group, lesser(p_.cols, (index + 1) * group), value, again);
      if (team.threads > 1) fence_past_cache();
    });
  }

  // Writes to any other sink, in strips of all `rows` rows, while the rows behind them are prefetched. finished(r,
  // begin) returns how to read row r from there on.
  template <class Finished>
  KERNELS_INLINE void write_rows(int64_t row, int rows, int group, int64_t last, const Finished& finished) const {
    const bool ahead = p_.cols <= kPrefetchedCols;
    const int64_t stride = kStride / group;
    for (int64_t begin = 0; begin < p_.cols; begin += stride) {
      const int64_t end = lesser(p_.cols, begin + stride);
      for (int r = 0; r < rows; ++r) {
        if (ahead && row + group + r < last) prefetch(p_.source, row + group + r, begin, end);
        const int lead = lead_of(end_, row + r);
        write(finished(r, begin), row + r, strip(begin, lead), strip(end, lead));
      }
    }
  }

  // ---- a row that threads share ------------------------------------------------------------------------------------

  int64_t chunk_cols() const {
    return greater(kChunkCols, (p_.cols + kMaxChunks - 1) / kMaxChunks + P::block - 1) / P::block * P::block;
  }
  int chunks() const {
    const int64_t width = chunk_cols();
    return int((p_.cols + width - 1) / width);
  }
  // Calls f(c, first column, end) for the chunks of a row.
  template <class F>
  void each_chunk(const Team& team, const F& f) const {
    const int64_t width = chunk_cols();
    const int count = chunks(), parts = lesser(team.threads, count);
    parallel(team, parts, [&](int part) {
      for (int c = count * part / parts; c < count * (part + 1) / parts; ++c) {
        f(c, c * width, lesser(p_.cols, (c + 1) * width));
      }
      if (parts > 1) fence_past_cache();
    });
  }

  State reduce_chunk(int64_t row, int64_t begin, int64_t end) const {
    alignas(64) C block[P::block];
    State chunk;
    each_block(begin, end,
               [&](int64_t col, int count) { join(chunk, reduce_block(row, col, count, block), col == begin); });
    return chunk;
  }
  // The chunks' states are merged in order, whichever threads computed them.
  State reduce_chunks(int64_t row, const Team& team) const {
    if (p_.cols <= kChunkCols) return reduce_chunk(row, 0, p_.cols);
    State all, states[kMaxChunks];
    each_chunk(team, [&](int c, int64_t begin, int64_t end) { states[c] = reduce_chunk(row, begin, end); });
    for (int c = 0, count = chunks(); c < count; ++c) join(all, states[c], c == 0);
    return all;
  }

  void streamed_row(int64_t row, const Team& team) const {
    const State all = reduce_chunks(row, team);
    const auto linear = p_.op.linear(all, finish_row(all, row));
    if constexpr (by_group<typename P::Sink>) {
      const auto silent = read_again(without_effects(map_), row, all, linear);
      write_groups(row, team, silent, read_again(map_, row, all, linear));
    } else if constexpr (P::row_sink) {
      typename decltype(end_)::State states[kMaxChunks]{}, sink_state{};
      const auto silent = without_effects(map_);
      each_chunk(team, [&](int c, int64_t begin, int64_t end) {
        each_block(begin, end, [&](int64_t col, int count) {
          alignas(64) C block[P::block];
          fill(block, col, count, read_again(silent, row, all, linear));
          accumulate(states[c], block, count);
        });
      });
      for (int c = 0, count = chunks(); c < count; ++c) end_.merge(sink_state, states[c]);
      end_.write_row(sink_state, row);
      const auto result = end_.finish(sink_state);
      each_chunk(team, [&](int, int64_t begin, int64_t end) {
        const auto value = read_again(map_, row, all, linear);
        p_.packs.each(begin, end, [value, sink = end_, result, row](auto width, int64_t col) KERNELS_INLINE {
          sink.store(value(width, col), result, row, col);
        });
      });
    } else {
      each_chunk(team, [&](int, int64_t begin, int64_t end) {
        write(read_again(map_, row, all, linear), row, begin, end);
      });
    }
  }

  const P& p_;
  std::decay_t<decltype(second_pass(std::declval<const typename P::Source&>()))> again_;
  std::decay_t<decltype(sink_map(std::declval<const typename P::Sink&>()))> map_;
  SinkEnd<typename P::Sink> end_;
};

template <class Options, class Source, class Sink>
Status run_rows(const cpu::Exec& cx, const Options& options, const Source& source, const Sink& sink, int64_t rows,
                int64_t cols) {
  if constexpr (!takes_values<Source, Sink>()) {
    return not_compiled();
  } else if constexpr (!takes_padding<SinkEnd<Sink>>()) {
    return not_compiled();
  } else {
    bool empty = false;
    KERNELS_TRY(check_rows(options, source, sink, rows, cols, empty));
    KERNELS_TRY(cx.status());
    if (empty) return {};
    using C = compute_type<Source>;
    using Op = decltype(options.template op<C>());
    using Problem = RowProblem<Op, Source, Sink>;
    Problem problem{options.template op<C>(), source, sink, rows, cols, {source, sink, cols}};
    // The widest pack of the library's sinks has 16 bytes.
    set_past_cache(problem.sink, rows > kPastCacheBytes / 16 * widest_of<Sink>() / cols);
    RowEngine<Problem>(problem).run(cx.team());
    return {};
  }
}

}  // namespace host
}  // namespace detail
KERNELS_END
