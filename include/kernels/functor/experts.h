// Mixtures of experts: weights and inputs that depend on each token's experts.
#pragma once

#include "matrices.h"

KERNELS_BEGIN

// Each token uses the weights of its own expert: token m is multiplied with rows ids[m] * n to ids[m] * n + n - 1 of
// the weights of all experts. ids are in the memory space in which the call runs, in [0, experts), or -1: the result of
// such a token is computed with the first expert's weights and must not be used.
template <class S>
class Experts : public Functor {
 public:
  static constexpr Role role = Role::source;
  Experts(S source, const int32_t* ids, int64_t n, int64_t experts)
      : source_(source), ids_(ids), n_(n), experts_(experts) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return detail::max_pack_of(source_); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(detail::check_pointer(ids_, "experts: the pointer to the ids is null",
                                      "experts: the pointer to the ids is not aligned for its elements"));
    if (experts_ < 1) return invalid("experts: the number of experts is less than 1");
    if (rows != n_) return invalid("experts: an expert's rows are not N");
    if (n_ > INT64_MAX / experts_) return invalid("experts: the rows of all experts exceed 64 bits");
    return detail::check_of(source_, n_ * experts_, cols);
  }
  KERNELS_HD Shifted<S> for_token(int64_t token) const { return {source_, greater<int64_t>(ids_[token], 0) * n_}; }

 private:
  S source_;
  const int32_t* ids_;
  int64_t n_, experts_;
};

// With top_k experts for each token, token m of the call is row m / top_k of the inputs: use repeated(x, top_k).
template <class S>
Experts<S> experts(S source, const int32_t* ids, int64_t n, int64_t experts) {
  static_assert(detail::is_source<S>, "experts() takes a source with the weights of all experts, one after the other");
  return {source, ids, n, experts};
}

// A source in which each row is repeated `times` times.
template <class S>
class Repeated : public Functor {
 public:
  static constexpr Role role = Role::source;
  static constexpr bool has_effects = false;  // repeated() does not take a source with any
  KERNELS_HD Repeated(S source, int64_t times) : source_(source), times_(times) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return detail::max_pack_of(source_); }
  KERNELS_HD auto cached() const {
    const auto source = detail::cached(source_);
    return Repeated<std::decay_t<decltype(source)>>(source, times_);
  }
  Status check(int64_t rows, int64_t cols) const {
    if (times_ < 1) return invalid("repeated: the number of times is less than 1");
    return detail::check_of(source_, detail::rows_for(rows, times_), cols);
  }
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const { return detail::fetch<N>(source_, row / times_, col); }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const {
    return detail::resolve(source_, fetched, row / times_, col);
  }

 private:
  S source_;
  int64_t times_;
};

namespace detail {
template <class S>
struct Traits<Repeated<S>> : ComputedTraits<S> {};
}  // namespace detail

template <class S>
Repeated<S> repeated(S source, int64_t times) {
  static_assert(
      !detail::has_effects<S>,
      "repeated() reads its rows more than once, and tee() or another effect must happen once: make these rows before with copy()");
  return {source, times};
}

// Rows sorted by expert, in an order that only the device knows (sort_by_expert() in router.h): row r is row order[r] /
// top_k of the source, or row 0 if order[r] is negative.
template <class S>
class Gathered : public Functor {
 public:
  static constexpr Role role = Role::source;
  static constexpr bool has_effects = false;  // gathered() does not take a source with any
  KERNELS_HD Gathered(S source, const int32_t* order, int64_t top_k) : source_(source), order_(order), top_k_(top_k) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return detail::max_pack_of(source_); }
  KERNELS_HD auto cached() const {
    const auto source = detail::cached(source_);
    return Gathered<std::decay_t<decltype(source)>>(source, order_, top_k_);
  }
  Status check(int64_t rows, int64_t cols) const {
    if (top_k_ < 1) return invalid("gathered: top_k is less than 1");
    if (top_k_ > INT32_MAX) return invalid("gathered: top_k exceeds 2^31 - 1");
    KERNELS_TRY(detail::check_pointer(order_, "gathered: the pointer to the order is null",
                                      "gathered: the pointer to the order is not aligned for 32-bit numbers"));
    return detail::check_of(source_, detail::rows_for(rows, top_k_), cols);
  }
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const { return detail::fetch<N>(source_, origin(row), col); }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const {
    return detail::resolve(source_, fetched, origin(row), col);
  }

  KERNELS_HD const S& source() const { return source_; }
  // The row of the source from which this row is read.
  KERNELS_HD int64_t origin(int64_t row) const {
    const int32_t at = order_[row];
    return at < 0 ? 0 : static_cast<uint32_t>(at) / static_cast<uint32_t>(top_k_);
  }

 private:
  S source_;
  const int32_t* order_;
  int64_t top_k_;
};

namespace detail {
template <class S>
struct is_gathered : std::false_type {};
template <class S>
struct is_gathered<Gathered<S>> : std::true_type {};
template <class S>
struct Traits<Gathered<S>> : PlacedTraits<S> {};
}  // namespace detail

// order: from sort_by_expert(). The source has a row for each token.
template <class S>
Gathered<S> gathered(S source, const int32_t* order, int64_t top_k) {
  static_assert(detail::is_source<S>, "gathered() takes a source, the order of its rows and top_k");
  static_assert(
      !detail::has_effects<S>,
      "gathered() reads its rows more than once, and tee() or another effect must happen once: make these rows before with copy()");
  return {source, order, top_k};
}

// Sums the experts' results of each token in one product: the sum over j of shares[m * top_k + j] times the product of
// the token's j-th input with the weights of expert ids[m * top_k + j]. The call sees the top_k inputs of a token as
// one row, and K = top_k * cols: mixed(w, ids, shares, top_k, n, cols, experts). An expert -1 has share 0; its inputs
// must be finite.
template <class S, class T>
class Mixed : public Functor {
 public:
  static constexpr Role role = Role::source;
  Mixed(S source, const int32_t* ids, const T* shares, int top_k, int64_t n, int64_t cols, int64_t experts)
      : source_(source), ids_(ids), shares_(shares), top_k_(top_k), n_(n), cols_(cols), experts_(experts) {}

  static constexpr int widest = detail::widest_of<S>();
  // A pack must not span two experts.
  int max_pack() const { return detail::pack_at(cols_, detail::max_pack_of(source_)); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(detail::check_pointer(ids_, "mixed: the pointer to the ids is null",
                                      "mixed: the pointer to the ids is not aligned for its elements"));
    KERNELS_TRY(detail::check_pointer(shares_, "mixed: the pointer to the shares is null",
                                      "mixed: the pointer to the shares is not aligned for its elements"));
    if (experts_ < 1) return invalid("mixed: the number of experts is less than 1");
    if (top_k_ < 1) return invalid("mixed: top_k is less than 1");
    if (cols_ < 0) return invalid("mixed: cols is negative");
    if (rows != n_) return invalid("mixed: an expert's rows are not N");
    if (n_ > INT64_MAX / experts_) return invalid("mixed: the rows of all experts exceed 64 bits");
    if (cols % top_k_ != 0 || cols / top_k_ != cols_) return invalid("mixed: K is not top_k x cols");
    return detail::check_of(source_, n_ * experts_, cols_);
  }

  class ForToken : public Functor {
   public:
    static constexpr Role role = Role::source;
    static constexpr int widest = Mixed::widest;
    KERNELS_HD ForToken(const Mixed& all, int64_t token) : all_(all), first_(token * all.top_k_) {}
    int max_pack() const { return all_.max_pack(); }

    template <class F>
    struct Some {
      F weights;
      Packed<T, 1> share;
      bool counts;
    };
    template <int N>
    KERNELS_HD auto fetch(int64_t row, int64_t col) const {
      const int64_t slot = first_ + part(col);
      const int64_t id = all_.ids_[slot];
      const auto weights =
          detail::fetch<N>(all_.source_, greater<int64_t>(id, 0) * all_.n_ + row, col - part(col) * all_.cols_);
      return Some<std::decay_t<decltype(weights)>>{weights, read<1, Cache::keep>(all_.shares_ + slot), id >= 0};
    }
    template <class F>
    KERNELS_HD auto unscaled(const F& fetched, int64_t row, int64_t col) const {
      return detail::resolve(all_.source_, fetched.weights, row, col - part(col) * all_.cols_);
    }
    template <class F>
    KERNELS_HD float scale_of(const F& fetched) const {
      return fetched.counts ? convert<float>(fetched.share.unpack().v[0]) : 0.f;
    }
    template <class F>
    KERNELS_HD auto resolve(const F& fetched, int64_t row, int64_t col) const {
      return unscaled(fetched, row, col) * scale_of(fetched);
    }

   private:
    KERNELS_HD int part(int64_t col) const {
      return int(static_cast<uint32_t>(col) / static_cast<uint32_t>(all_.cols_));
    }

    const Mixed& all_;
    int64_t first_;
  };
  KERNELS_HD ForToken for_token(int64_t token) const { return {*this, token}; }

 private:
  S source_;
  const int32_t* ids_;
  const T* shares_;
  int top_k_;
  int64_t n_, cols_, experts_;
};

template <class S, class T>
Mixed<S, T> mixed(S source, const int32_t* ids, const T* shares, int top_k, int64_t n, int64_t cols, int64_t experts) {
  static_assert(detail::is_source<S>, "mixed() takes a source with the weights of all experts, one after the other");
  return {source, ids, shares, top_k, n, cols, experts};
}

KERNELS_END
