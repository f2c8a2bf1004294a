// Strided heads: queries and results whose heads and sequences have any strides in memory, and sources for norms of
// heads.
//
//   auto q = k::load(qp, k::heads(dim, token_stride, head_stride));      // a sequence, or ragged ones
//   auto o = k::store(op, k::heads(dim, token_stride, head_stride).batches(q_len, batch_stride));
//                                                                        // q_len rows of each sequence
//
// Row b * q_len + i is query i of sequence b; column h * dim + c is column c of head h. Element (b, i, h, c) is at p[b
// * batch_stride + i * token_stride + h * head_stride + c]. Strides count elements. For PyTorch's (batch, heads,
// length, dim), batch_stride, head_stride and token_stride are t.stride(0), t.stride(1) and t.stride(2). Maps, rope()
// and other operations see only rows and columns, not the strides.
#pragma once

#include "core/arguments.h"
#include "functor.h"
#include "functor/head_scales.h"

KERNELS_BEGIN

class Heads {
 public:
  Heads(int64_t dim, int64_t token_stride, int64_t head_stride)
      : dim_(dim), token_stride_(token_stride), head_stride_(head_stride) {}

  // Sequences of `rows` rows each, batch_stride elements apart.
  Heads batches(int64_t rows, int64_t batch_stride) const {
    Heads out = *this;
    out.batched_ = true, out.batch_rows_ = rows, out.batch_stride_ = batch_stride;
    return out;
  }

  int64_t dim() const { return dim_; }

  // Rows and columns are less than 2^32, so 32-bit division is enough.
  KERNELS_HD int64_t place(int64_t row, int64_t col) const {
    const uint32_t dim = uint32_t(dim_), head = uint32_t(col) / dim;
    int64_t at = head * head_stride_ + (uint32_t(col) - head * dim);
    if (batched_) {
      const uint32_t rows = uint32_t(batch_rows_), batch = uint32_t(row) / rows;
      at += batch * batch_stride_;
      row = uint32_t(row) - batch * rows;
    }
    return at + row * token_stride_;
  }

  // The widest pack that does not cross a head's end and that address and strides allow.
  template <class T>
  int max_pack(const T* p, int widest) const {
    return detail::pack_at(dim_, lesser(detail::aligned_pack(p, token_stride_, widest),
                                        lesser(detail::aligned_pack(p, head_stride_, widest),
                                               detail::aligned_pack(p, batch_stride_, widest))));
  }

  template <class T>
  Status check(int64_t rows, int64_t cols) const {
    constexpr int64_t limit = UINT32_MAX;
    if (dim_ < 1 || cols % dim_ != 0) return invalid("heads: the columns are no whole heads of dim");
    if (token_stride_ < 0) return invalid("heads: the stride of tokens is negative");
    if (head_stride_ < 0) return invalid("heads: the stride of heads is negative");
    if (batch_stride_ < 0) return invalid("heads: the stride of batches is negative");
    if (batched_ && (batch_rows_ < 1 || rows % batch_rows_ != 0))
      return invalid("heads: the rows are no whole batches");
    if (cols > limit || (batched_ && rows > limit)) return unsupported("heads: more than 2^32 - 1 rows or columns");
    if (detail::rows_overflow<T>(rows, token_stride_) || detail::rows_overflow<T>(cols / dim_, head_stride_) ||
        detail::rows_overflow<T>(rows, batch_stride_)) {
      return invalid("heads: a stride times rows or heads exceeds 64 bits");
    }
    return {};
  }
  // For what is written: no two elements may be at the same address.
  template <class T>
  Status check_apart(int64_t rows, int64_t cols) const {
    KERNELS_TRY(check<T>(rows, cols));
    // With ragged sequences, `rows` is only an upper bound.
    const int64_t heads = cols / dim_,
                  tokens = batched_   ? batch_rows_
                           : rows > 1 ? 2
                                      : rows,
                  batches = batched_ ? rows / batch_rows_ : 1;
    struct Step {
      int64_t stride, count;
    } steps[] = {{token_stride_, tokens}, {head_stride_, heads}, {batch_stride_, batches}};
    const auto order = [&](int a, int b) {
      if (steps[b].stride < steps[a].stride) std::swap(steps[a], steps[b]);
    };
    order(0, 1), order(1, 2), order(0, 1);
    int64_t taken = dim_;
    for (const Step& step : steps) {
      if (step.count < 2) continue;
      if (step.stride < taken) return invalid("heads: strides put two results in the same place");
      taken += step.stride * (step.count - 1);
    }
    return {};
  }

  // For arguments that check() accepts. Adjacent heads, and sequences that follow each other like their rows, form a
  // plain matrix.
  template <class T>
  detail::Plane plane(const T* p, int64_t rows, int64_t cols) const {
    const int64_t size = int64_t(sizeof(T)), heads = cols / dim_, tokens = batched_ ? lesser(rows, batch_rows_) : rows;
    detail::Plane out = detail::plane(p, token_stride_, tokens, cols);
    if (out.rows == 0) return out;
    if (heads > 1 && head_stride_ != dim_) out.bytes = dim_ * size, out.heads = {heads, head_stride_ * size};
    if (tokens == rows) return out;
    if (tokens == 1) out.rows = rows, out.stride = batch_stride_ * size;
    else if (batch_stride_ == tokens * token_stride_) out.rows = rows;
    else out.batches = {rows / tokens, batch_stride_ * size};
    return out;
  }

 private:
  int64_t dim_, token_stride_, head_stride_, batch_rows_ = 0, batch_stride_ = 0;
  bool batched_ = false;
};

inline Heads heads(int64_t dim, int64_t token_stride, int64_t head_stride) { return {dim, token_stride, head_stride}; }

template <class T>
class HeadsLoad : public Functor {
 public:
  static constexpr Role role = Role::source;
  HeadsLoad(const T* p, const Heads& where) : p_(p), where_(where) {}

  static constexpr int widest = 16 / int(sizeof(T));
  int max_pack() const { return where_.max_pack(p_, widest); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(
        detail::check_pointer(p_, "load: the pointer is null", "load: the pointer is not aligned for its elements"));
    return where_.check<T>(rows, cols);
  }

  detail::Plane plane(int64_t rows, int64_t cols) const { return where_.plane(p_, rows, cols); }

  int64_t head_dim() const { return where_.dim(); }
  KERNELS_HD const T* at(int64_t row, int64_t col) const { return p_ + where_.place(row, col); }
  template <int N>
  KERNELS_HD Packed<T, N> fetch(int64_t row, int64_t col) const { return read<N, Cache::stream>(at(row, col)); }
  template <int N>
  KERNELS_HD auto resolve(const Packed<T, N>& fetched, int64_t, int64_t) const {
    return convert<compute_t<T>>(fetched.unpack());
  }

 private:
  const T* p_;
  Heads where_;
};

namespace detail {
// Like DirectLoad, but a row is not contiguous: the next head may be far away.
template <class T>
struct Traits<HeadsLoad<T>> : Traits<DirectLoad<T>> {
  static constexpr bool lies_flat = false, rows_in_runs = false;
};
}  // namespace detail

template <class T>
class HeadsStore : public Functor {
 public:
  static constexpr Role role = Role::sink;
  HeadsStore(T* p, const Heads& where) : p_(p), where_(where) {}

  static constexpr int widest = 16 / int(sizeof(T));
  int max_pack() const { return where_.max_pack(p_, widest); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(
        detail::check_pointer(p_, "store: the pointer is null", "store: the pointer is not aligned for its elements"));
    return where_.check_apart<T>(rows, cols);
  }
  detail::Plane plane(int64_t rows, int64_t cols) const { return where_.plane(p_, rows, cols); }

  template <int N, class C>
  KERNELS_HD void store(const Pack<C, N>& v, int64_t row, int64_t col) const {
    write<N>(p_ + where_.place(row, col), convert<T>(v));
  }

 private:
  T* p_;
  Heads where_;
};

// A source that every head of a row reads alike: value(row, h * dim + c) = source(row, c). For the weights of a norm
// over heads.
template <class S>
class EachHead : public Functor {
 public:
  static constexpr Role role = Role::source;
  static constexpr bool has_effects = false;  // each_head() does not take a source with any
  EachHead(S source, int64_t dim) : source_(source), dim_(dim) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return detail::pack_at(dim_, detail::max_pack_of(source_)); }
  Status check(int64_t rows, int64_t cols) const {
    if (dim_ < 1 || cols % dim_ != 0) return invalid("each_head: the columns are no whole heads of dim");
    if (cols > UINT32_MAX) return unsupported("each_head: more than 2^32 - 1 columns");
    return detail::check_of(source_, rows, dim_);
  }
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const { return detail::fetch<N>(source_, row, in_head(col)); }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const {
    return detail::resolve(source_, fetched, row, in_head(col));
  }

 private:
  KERNELS_HD int64_t in_head(int64_t col) const { return static_cast<uint32_t>(col) % static_cast<uint32_t>(dim_); }

  S source_;
  int64_t dim_;
};

// A pointer means a row vector of dim elements.
template <class S>
auto each_head(S source, int64_t dim) {
  static_assert(!detail::has_effects<S>,
                "each_head() reads its columns more than once, and tee() or another effect must happen once");
  return EachHead<detail::source_t<S>>(detail::as_source(source), dim);
}

// RMSNorm of each head of a source while it is read (each head is divided by the root mean square of its values). For
// queries on their way into attention: normed_heads(k::load(q, ld), dim, 1e-6) | k::affine(k::each_head(weight, dim)) |
// rope. Each access to a pack reads its whole head again, from the nearest cache after the first time. Keys, and
// queries that are read often, are better normalized once by norm_heads().
template <class S>
class NormedHeads : public Functor {
 public:
  static constexpr Role role = Role::source;
  static constexpr bool has_effects = false;  // normed_heads() does not take a source with any
  using C = compute_type<S>;
  NormedHeads(S source, int64_t dim, double eps) : source_(source), dim_(dim), eps_(static_cast<C>(eps)) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return detail::pack_at(dim_, detail::max_pack_of(source_)); }
  Status check(int64_t rows, int64_t cols) const {
    if (dim_ < 1 || cols % dim_ != 0) return invalid("normed_heads: the columns are no whole heads of dim");
    if (cols > UINT32_MAX) return unsupported("normed_heads: more than 2^32 - 1 columns");
    if (!(eps_ >= 0)) return invalid("normed_heads: eps is negative or NaN");
    return detail::check_of(source_, rows, cols);
  }
  // element 0: an element is read for the other columns of its head too, which may happen after a result is written
  // there.
  detail::Plane plane(int64_t rows, int64_t cols) const {
    detail::Plane all = detail::plane_of(source_, rows, cols);
    all.element = 0;
    return all;
  }

  template <class F>
  struct Scaled {
    F mine;
    C rstd;
  };
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const {
    const auto mine = detail::fetch<N>(source_, row, col);
    const int64_t begin = col - static_cast<uint32_t>(col) % static_cast<uint32_t>(dim_);
    C squares = C(0);
    for (int64_t at = begin; at < begin + dim_; at += N) {
      const Pack<C, N> x = detail::resolve(source_, detail::fetch<N>(source_, row, at), row, at);
      squares = squares + dot(x, x);
    }
    return Scaled<std::decay_t<decltype(mine)>>{mine, rsqrt(squares / C(dim_) + eps_)};
  }
  template <class F>
  KERNELS_HD auto resolve(const Scaled<F>& fetched, int64_t row, int64_t col) const {
    return detail::resolve(source_, fetched.mine, row, col) * fetched.rstd;
  }

 private:
  S source_;
  int64_t dim_;
  C eps_;
};

template <class S>
NormedHeads<S> normed_heads(S source, int64_t dim, double eps = 1e-5) {
  static_assert(detail::is_source<S>, "normed_heads() takes a source, the columns of a head and eps");
  static_assert(!detail::has_effects<S>,
                "normed_heads() reads a head more than once, and tee() or another effect must happen once");
  return {source, dim, eps};
}

// Rows of `heads` adjacent heads of dim columns; the first `normed` of them are normalized.
struct HeadShape {
  int64_t tokens, heads, dim, normed;
};

namespace detail {

constexpr int kMaxHeadDim = 256;

// Whether norm_heads() accepts these types; if not, a static_assert says why.
template <class Source, class Sink, class Options>
constexpr bool takes_heads() {
  static_assert(!std::is_arithmetic<Options>::value,
                "norm_heads: a number where there must be options: k::RmsNorm{}.eps(1e-6), or k::LayerNorm");
  constexpr bool right = takes_source<Source>() && takes_sink<Sink>() && !std::is_arithmetic<Options>::value;
  if constexpr (right) {
    static_assert(HeadScales<Sink>::supported,
                  "norm_heads: scales are found for heads, of codes of 8 bits: k::quantize(q, ld, scales, heads, dim), "
                  "k::append_keys(kv, at, dim, scales); not for whole rows, and not of 4 bits, which copy() writes");
    static_assert(!has_effects<Source>, "norm_heads: put tee() into the operation that makes these rows");
    return HeadScales<Sink>::supported && !has_effects<Source>;
  } else {
    return false;
  }
}

template <class Options, class Source, class Sink>
Status check_norm_heads(const Options& options, const Source& in, const Sink& out, const HeadShape& shape,
                        bool& empty) {
  empty = true;
  if (shape.tokens < 0) return invalid("norm_heads: tokens is negative");
  if (shape.heads < 0) return invalid("norm_heads: heads is negative");
  if (shape.dim < 2 || shape.dim % 2 != 0) return invalid("norm_heads: dim is odd, or less than 2");
  if (shape.dim > kMaxHeadDim) return unsupported("norm_heads: dim exceeds 256");
  if (shape.normed < 0) return invalid("norm_heads: normed is negative");
  if (shape.normed > shape.heads) return invalid("norm_heads: normed exceeds heads");
  if (shape.heads > (int64_t(1) << 30) / shape.dim) return unsupported("norm_heads: heads x dim exceeds 2^30");
  if (shape.heads > 0 && shape.tokens > INT64_MAX / shape.heads)
    return invalid("norm_heads: tokens x heads exceeds 64 bits");
  KERNELS_TRY(options.check().in("norm_heads"));
  empty = shape.tokens == 0 || shape.heads == 0;
  if (empty) return {};
  const int64_t cols = shape.heads * shape.dim;
  KERNELS_TRY(check_of(in, shape.tokens, cols).of("in").in("norm_heads"));
  KERNELS_TRY(check_of(out, shape.tokens, cols).of("out").in("norm_heads"));
  KERNELS_TRY(HeadScales<Sink>::check(out, shape.dim).of("out").in("norm_heads"));
  if (!pairs_within(out, shape.dim))
    return invalid("norm_heads: out: the columns of qkv(), or the heads of rope(), are no whole heads of dim");
  const Plane read = plane_of(in, shape.tokens, cols), written = plane_of(out, shape.tokens, cols);
  if (share_bytes(read, written) && !in_place(read, written))
    return invalid("norm_heads: out overlaps in, and not element for element");
  return {};
}

}  // namespace detail

template <class T>
auto load(const T* p, const Heads& where) {
  if constexpr (detail::has_elements<T>()) return HeadsLoad<T>(p, where);
  else return HeadsLoad<float>(nullptr, where);
}
template <class T>
auto store(T* p, const Heads& where) {
  if constexpr (detail::takes_elements<T>()) return HeadsStore<T>(p, where);
  else return HeadsStore<float>(nullptr, where);
}

KERNELS_END
