// The row engine on the CPU: drives the row ops, sources, maps and sinks that the GPU's drives.
//
// Sources and sinks move packs; the ops work on blocks of kBlock columns, large enough that bringing a row's states
// together costs little. A row of up to kCached columns stays in the cache, on the stack, between its two passes, each
// block centered on its own state; a longer one is read twice. Whatever decides how a row is computed is fixed by cols
// alone, so that results do not depend on the number of threads.
#pragma once

#include <type_traits>

#include "../../core/row_call.h"
#include "../../core/row_op.h"
#include "../../functor.h"
#include "../exec.h"

KERNELS_BEGIN
namespace detail {
namespace host {
inline namespace KERNELS_ISA {

// Whether a functor takes packs of any width at any column and address. The library's own do: host reads and writes
// need no alignment. A user's may rely on what the GPU promises, and then gets that (see Packs).
template <class F>
struct AnyWidth {
  static constexpr bool value = !oneflow_load<F> && !oneflow_store<F> && !has_widest<F>::value && !has_max_pack<F>::value;
};
template <class... F>
constexpr bool any_width = (AnyWidth<F>::value && ...);

#define KERNELS_ANY_WIDTH(parameters, functor, answer) \
  template <parameters>                                \
  struct AnyWidth<functor> {                           \
    static constexpr bool value = answer;              \
  }
#define KERNELS_TWO class A, class B
#define KERNELS_PAIR(name) name<A, B>
KERNELS_ANY_WIDTH(KERNELS_TWO, KERNELS_PAIR(DirectLoad), true);
KERNELS_ANY_WIDTH(KERNELS_TWO, KERNELS_PAIR(DirectStore), true);
KERNELS_ANY_WIDTH(class A, RowVector<A>, true);
KERNELS_ANY_WIDTH(class A, Tee<A>, true);
KERNELS_ANY_WIDTH(class A, Quantize<A>, true);
KERNELS_ANY_WIDTH(class A, Cycle<A>, any_width<A>);
KERNELS_ANY_WIDTH(KERNELS_TWO, KERNELS_PAIR(Binary), any_width<A>);
KERNELS_ANY_WIDTH(KERNELS_TWO, KERNELS_PAIR(Affine), (any_width<A, B>));
KERNELS_ANY_WIDTH(KERNELS_TWO, KERNELS_PAIR(Both), (any_width<A, B>));
KERNELS_ANY_WIDTH(KERNELS_TWO, KERNELS_PAIR(MappedSource), (any_width<A, B>));
KERNELS_ANY_WIDTH(KERNELS_TWO, KERNELS_PAIR(MappedSink), (any_width<A, B>));
KERNELS_ANY_WIDTH(KERNELS_TWO, KERNELS_PAIR(MapChain), (any_width<A, B>));
#undef KERNELS_PAIR
#undef KERNELS_TWO
#undef KERNELS_ANY_WIDTH

template <int N>
using Width = std::integral_constant<int, N>;

// The packs in which a row is read and written: the widest throughout and narrower ones for what is left, or, where a
// functor asks for more care, packs of one width that divides cols and that every functor allows.
template <class Source, class Sink>
class Packs {
  static constexpr bool any = any_width<Source, Sink>;
  static constexpr int narrower = widest_of<Source>() < widest_of<Sink>() ? widest_of<Source>() : widest_of<Sink>();
  static constexpr int wide = any ? kWidestPack : narrower;
  static constexpr int middle = wide >= 8 ? 4 : wide == 4 ? 2 : 1;

 public:
  Packs(const Source& source, const Sink& sink, int64_t cols) {
    if (any) return;
    const int most = lesser(max_pack_of(source), max_pack_of(sink));
    while (width_ > 1 && (width_ > most || cols % width_ != 0)) width_ = width_ == wide ? middle : 1;
  }

  // f(Width<N>, col) for all packs in [begin, end).
  template <class F>
  void each(int64_t begin, int64_t end, const F& f) const {
    if (any || width_ == wide) begin = run<wide>(begin, end, f);
    if (any || width_ == middle) begin = run<middle>(begin, end, f);
    if (any || width_ == 1) run<1>(begin, end, f);
  }

 private:
  template <int N, class F>
  static int64_t run(int64_t col, int64_t end, const F& f) {
    for (; col + N <= end; col += N) f(Width<N>{}, col);
    return col;
  }

  int width_ = wide;
};

constexpr int kBlockBytes = 1024;
constexpr int kCachedBytes = 64 << 10;
constexpr int64_t kChunkCols = 16384;
constexpr int kMaxChunks = 64;
// Results larger than this are written around the cache.
constexpr int64_t kPastCacheBytes = 32ll << 20;

template <class Op_, class Source_, class Sink_>
struct RowProblem {
  using Op = Op_;
  using Source = Source_;
  using Sink = Sink_;
  using C = compute_type<Source>;
  static constexpr bool row_sink = is_row_sink<decltype(sink_end(std::declval<const Sink&>()))>;
  static constexpr int block = kBlockBytes / int(sizeof(C));
  static constexpr int64_t cached = kCachedBytes / int(sizeof(C));

  Op op;
  Source source;
  Sink sink;
  int64_t rows, cols;
  Packs<Source, Sink> packs;
};

template <class P>
class RowEngine {
 public:
  explicit RowEngine(const P& problem)
      : p_(problem), again_(second_pass(p_.source)), map_(sink_map(p_.sink)), silent_(without_effects(map_)), end_(sink_end(p_.sink)) {}

  void run(int threads) const {
    if (p_.cols > P::cached && p_.rows < threads) {
      for (int64_t row = 0; row < p_.rows; ++row) streamed_row(row, threads);
      return;
    }
    const int parts = int(p_.rows < threads ? p_.rows : threads);
    parallel(parts, [&](int part) {
      const int64_t first = share(part, parts), last = share(part + 1, parts);
      if (p_.cols <= P::cached) cached_rows(first, last);
      else for (int64_t row = first; row < last; ++row) streamed_row(row, 1);
      fence_past_cache();
    });
  }

 private:
  using C = typename P::C;
  using Op = typename P::Op;
  using State = typename Op::State;
  using Block = Pack<C, P::block>;

  // rows * part / parts, which must not overflow.
  int64_t share(int part, int parts) const {
    return p_.rows / parts * part + p_.rows % parts * part / parts;
  }

  // ---- blocks ------------------------------------------------------------------------------------------------------

  // f(first column, number of columns) for the blocks of [begin, end).
  template <class F>
  void each_block(int64_t begin, int64_t end, const F& f) const {
    for (int64_t col = begin; col < end; col += P::block) f(col, int(lesser<int64_t>(P::block, end - col)));
  }

  // Sets the block's first `valid` values, f(Width<N>, col) giving packs of them, and pads the rest.
  template <class F>
  void fill(Block& block, int64_t begin, int valid, C padding, const F& f) const {
    p_.packs.each(begin, begin + valid, [&](auto width, int64_t col) { put_pack<width()>(block, col - begin, f(width, col)); });
    for (int i = valid; i < P::block; ++i) block.v[i] = padding;
  }
  template <class Source>
  void read_block(Block& block, const Source& source, int64_t row, int64_t begin, int valid) const {
    fill(block, begin, valid, p_.op.padding(), [&](auto width, int64_t col) {
      return resolve(source, fetch<width()>(source, row, col), row, col);
    });
  }
  template <int N>
  static void put_pack(Block& block, int64_t at, const Pack<C, N>& v) { memcpy(block.v + at, v.v, sizeof(v.v)); }
  template <int N>
  static Pack<C, N> get_pack(const Block& block, int64_t at) {
    Pack<C, N> v;
    memcpy(v.v, block.v + at, sizeof(v.v));
    return v;
  }

  template <int N, class Map>
  static auto mapped(const Map& map, const Pack<C, N>& v, int64_t row, int64_t col) {
    return apply_map(map, v, fetch_operands<N>(map, row, col), row, col);
  }

  // ---- a row that stays in the cache -------------------------------------------------------------------------------

  void cached_rows(int64_t first, int64_t last) const {
    alignas(64) Block blocks[P::cached / P::block];
    State states[P::cached / P::block];
    for (int64_t row = first; row < last; ++row) {
      State all;
      each_block(0, p_.cols, [&](int64_t col, int valid) {
        Block& block = blocks[col / P::block];
        State& state = states[col / P::block];
        read_block(block, p_.source, row, col, valid);
        state = p_.op.absorb(block, valid);
        p_.op.merge(all, state);
      });
      const auto result = p_.op.finish(all, Count<C>(int(p_.cols)));
      p_.op.write_row(result, row);

      const auto finished = [&](int64_t begin) {
        return [&, begin, linear = p_.op.linear(states[begin / P::block], result)](auto width, int64_t col) {
          return mapped(map_, linear(get_pack<width()>(blocks[begin / P::block], col - begin)), row, col);
        };
      };
      if constexpr (P::row_sink) {
        typename decltype(end_)::State sink_state;
        each_block(0, p_.cols, [&](int64_t col, int valid) {
          Block& block = blocks[col / P::block];
          fill(block, col, valid, end_.padding(), finished(col));
          end_.accumulate(sink_state, block, valid);
        });
        end_.write_row(sink_state, row);
        const auto sink_result = end_.finish(sink_state);
        each_block(0, p_.cols, [&](int64_t begin, int valid) {
          p_.packs.each(begin, begin + valid, [&](auto width, int64_t col) {
            end_.store(get_pack<width()>(blocks[begin / P::block], col - begin), sink_result, row, col);
          });
        });
      } else {
        each_block(0, p_.cols, [&](int64_t begin, int valid) {
          const auto value = finished(begin);
          p_.packs.each(begin, begin + valid, [&](auto width, int64_t col) { put(end_, value(width, col), row, col); });
        });
      }
    }
  }

  // ---- a row that is read again ------------------------------------------------------------------------------------

  // Chunks are what threads share a row by; their states are merged in order.
  void streamed_row(int64_t row, int threads) const {
    const int64_t width = greater(kChunkCols, (p_.cols + kMaxChunks - 1) / kMaxChunks + P::block - 1) / P::block * P::block;
    const int chunks = int((p_.cols + width - 1) / width);
    const auto each_chunk = [&](const auto& f) {
      const int parts = lesser(threads, chunks);
      parallel(parts, [&](int part) {
        for (int c = chunks * part / parts; c < chunks * (part + 1) / parts; ++c) f(c, c * width, lesser(p_.cols, (c + 1) * width));
        fence_past_cache();
      });
    };

    State states[kMaxChunks];
    each_chunk([&](int c, int64_t begin, int64_t end) {
      each_block(begin, end, [&](int64_t col, int valid) {
        Block block;
        read_block(block, p_.source, row, col, valid);
        p_.op.merge(states[c], p_.op.absorb(block, valid));
      });
    });
    State all;
    for (int c = 0; c < chunks; ++c) p_.op.merge(all, states[c]);
    const auto result = p_.op.finish(all, Count<C>(int(p_.cols)));
    const auto linear = p_.op.linear(all, result);
    p_.op.write_row(result, row);

    const auto finished = [&](const auto& map) {
      return [&](auto width, int64_t col) {
        const Pack<C, width()> x = resolve(again_, fetch<width()>(again_, row, col), row, col);
        return mapped(map, linear(p_.op.center(x, all)), row, col);
      };
    };
    if constexpr (P::row_sink) {
      using SinkState = typename decltype(end_)::State;
      SinkState sink_states[kMaxChunks];
      each_chunk([&](int c, int64_t begin, int64_t end) {
        each_block(begin, end, [&](int64_t col, int valid) {
          Block block;
          fill(block, col, valid, end_.padding(), finished(silent_));
          end_.accumulate(sink_states[c], block, valid);
        });
      });
      SinkState sink_state;
      for (int c = 0; c < chunks; ++c) end_.merge(sink_state, sink_states[c]);
      end_.write_row(sink_state, row);
      const auto sink_result = end_.finish(sink_state);
      each_chunk([&](int, int64_t begin, int64_t end) {
        const auto value = finished(map_);
        p_.packs.each(begin, end, [&](auto width, int64_t col) { end_.store(value(width, col), sink_result, row, col); });
      });
    } else {
      each_chunk([&](int, int64_t begin, int64_t end) {
        const auto value = finished(map_);
        p_.packs.each(begin, end, [&](auto width, int64_t col) { put(end_, value(width, col), row, col); });
      });
    }
  }

  const P& p_;
  decltype(second_pass(std::declval<const typename P::Source&>())) again_;
  decltype(sink_map(std::declval<const typename P::Sink&>())) map_;
  decltype(without_effects(std::declval<const decltype(map_)&>())) silent_;
  decltype(sink_end(std::declval<const typename P::Sink&>())) end_;
};

template <class Options, class Source, class Sink>
Status run_rows(const cpu::Exec& cx, const Options& options, const Source& source, const Sink& sink, int64_t rows, int64_t cols) {
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
  RowEngine<Problem>(problem).run(cx.threads());
  return {};
}

}
}  // namespace host
}  // namespace detail
KERNELS_END
