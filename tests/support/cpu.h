// What the CPU tests share: the operations with their oracles, shapes, and Trial, one call with its check.
#pragma once

#include <kernels/cpu/exec.h>
#include <kernels/cpu/layernorm.h>
#include <kernels/cpu/rmsnorm.h>
#include <kernels/cpu/softmax.h>

#include "guarded.h"
#include "oracle.h"
#include "random.h"
#include "tally.h"

namespace k = kernels;

namespace test {

// ---- operations, with their oracles ---------------------------------------------------------------------------------

struct Softmax {
  static constexpr const char* name = "softmax";
  static constexpr bool holes = true, has_mean = false, has_rstd = false;

  template <class In, class Out, class C>
  k::Status run(const k::cpu::Exec& cx, const In& in, const Out& out, int64_t rows, int64_t cols, C*, C*) const {
    return k::cpu::softmax(cx, in, out, rows, cols);
  }
  template <class C>
  RowStatistics<C> expect(Row<C>& x) const {
    softmax(x);
    return {};
  }
};

struct LogSoftmax {
  static constexpr const char* name = "log_softmax";
  static constexpr bool holes = true, has_mean = false, has_rstd = false;

  template <class In, class Out, class C>
  k::Status run(const k::cpu::Exec& cx, const In& in, const Out& out, int64_t rows, int64_t cols, C*, C*) const {
    return k::cpu::log_softmax(cx, in, out, rows, cols);
  }
  template <class C>
  RowStatistics<C> expect(Row<C>& x) const {
    log_softmax(x);
    return {};
  }
};

struct LayerNorm {
  static constexpr const char* name = "layernorm";
  static constexpr bool holes = false, has_mean = true, has_rstd = true;
  double eps = 1e-5;

  template <class In, class Out, class C>
  k::Status run(const k::cpu::Exec& cx, const In& in, const Out& out, int64_t rows, int64_t cols, C* mean,
                C* rstd) const {
    return k::cpu::layernorm(cx, in, out, rows, cols, k::LayerNorm{}.eps(eps).mean(mean).rstd(rstd));
  }
  template <class C>
  RowStatistics<C> expect(Row<C>& x) const { return layernorm(x, eps); }
};

struct RmsNorm {
  static constexpr const char* name = "rmsnorm";
  static constexpr bool holes = false, has_mean = false, has_rstd = true;
  double eps = 1e-5;

  template <class In, class Out, class C>
  k::Status run(const k::cpu::Exec& cx, const In& in, const Out& out, int64_t rows, int64_t cols, C*, C* rstd) const {
    return k::cpu::rmsnorm(cx, in, out, rows, cols, k::RmsNorm{}.eps(eps).rstd(rstd));
  }
  template <class C>
  RowStatistics<C> expect(Row<C>& x) const { return {{}, rmsnorm(x, eps)}; }
};

// ---- shapes ---------------------------------------------------------------------------------------------------------

struct Shape {
  int64_t rows, cols;
  int64_t in_gap = 0, out_gap = 0;      // row stride - cols
  int64_t in_shift = 0, out_shift = 0;  // elements past an aligned address
  bool in_place = false;
};

// Misaligned pointers and row strides above cols, odd and even, around the widths of vectors and blocks.
inline std::vector<Shape> awkward_shapes() {
  std::vector<Shape> shapes;
  const int64_t gaps[][2] = {{0, 0}, {1, 0}, {0, 1}, {3, 6}, {16, 16}};
  const int64_t shifts[][2] = {{0, 0}, {1, 0}, {0, 1}, {1, 1}, {4, 2}};
  for (const int64_t cols : {1, 2, 3, 8, 15, 17, 31, 33, 64, 100, 255, 257, 1000, 1024, 2047, 4100}) {
    for (const auto& gap : gaps) {
      for (const auto& shift : shifts) shapes.push_back({3, cols, gap[0], gap[1], shift[0], shift[1]});
    }
  }
  const int64_t by_one[][2] = {{1, 0}, {0, 1}, {1, 1}};
  // By one element alone, around every number of vectors that a loop may take at a time.
  for (const int64_t cols :
       {4, 5, 7, 9, 16, 32, 63, 65, 96, 127, 128, 129, 256, 511, 512, 513, 768, 1001, 2049, 4096}) {
    for (const auto& shift : by_one) shapes.push_back({3, cols, 0, 0, shift[0], shift[1]});
  }
  return shapes;
}

// ---- Trial ----------------------------------------------------------------------------------------------------------

// How a Trial reads and writes, unless told otherwise.
struct Direct {
  template <class T> static auto load(const T* p, int64_t ld) { return k::load(p, ld); }
  template <class T> static auto store(T* p, int64_t ld) { return k::store(p, ld); }
};

// One call on guarded memory: random rows, unless input() gives others; run() calls the operation and compares every
// row with the oracle.
template <class Op, class S, class D = S, class Io = Direct>
class Trial {
 public:
  using C = k::compute_t<S>;

  // In place: S and D of the same size.
  explicit Trial(const Shape& shape, const Op& op = {})
      : shape_(shape),
        op_(op),
        in_(shape.rows, shape.cols, shape.cols + shape.in_gap, shape.in_shift,
            shape.in_place ? Poison::garbage : Poison::nan),
        out_(shape.in_place ? 0 : shape.rows, shape.cols, shape.cols + shape.out_gap, shape.out_shift),
        mean_(Op::has_mean ? shape.rows : 0, 1, 1),
        rstd_(Op::has_rstd ? shape.rows : 0, 1, 1) {
    RandomRows rows(mix(uint64_t(shape.cols)) + uint64_t(shape.rows), Op::holes);
    for (int64_t r = 0; r < shape.rows; ++r) {
      rows.row(r, shape.cols, [&](int64_t c, double x) { in_.set(r, c, make<S>(x)); });
    }
    remember();
  }

  template <class F>
  Trial& input(F value) {
    for (int64_t r = 0; r < in_.rows(); ++r) {
      for (int64_t c = 0; c < in_.cols(); ++c) in_.set(r, c, make<S>(value(r, c)));
    }
    remember();
    return *this;
  }

  // "" or what is wrong. Only every `step`th row and the last are compared with the oracle.
  std::string run(const k::cpu::Exec& cx = k::cpu::Exec{1}, int64_t step = 1) {
    const k::Status status =
        op_.run(cx, Io::load(static_cast<const S*>(in_.data()), in_.ld()), sink(), shape_.rows, shape_.cols,
                Op::has_mean ? mean_.data() : nullptr, Op::has_rstd ? rstd_.data() : nullptr);
    if (!status) return describe() + ": refused, " + status.reason();
    if (shape_.cols == 0 && !(mean_.unchanged() && rstd_.unchanged()))
      return describe() + ": wrote mean or rstd of empty rows";
    if (!shape_.in_place && !in_.unchanged()) return describe() + ": the input was changed";
    in_.download();
    out_.download();
    mean_.download();
    rstd_.download();
    if (!in_.intact() || !out_.intact()) return describe() + ": wrote outside its rows";
    if (!mean_.intact() || !rstd_.intact()) return describe() + ": wrote outside mean or rstd";
    for (int64_t r = 0; r < shape_.rows && shape_.cols > 0; ++r) {
      if (r % step != 0 && r != shape_.rows - 1) continue;
      if (const std::string problem = verify_row(r); !problem.empty()) return describe() + ", " + problem;
    }
    return "";
  }

  // The bits of all that was written, guards included.
  std::vector<unsigned char> bits() const {
    std::vector<unsigned char> all = shape_.in_place ? in_.bytes() : out_.bytes();
    for (const auto& more : {mean_.bytes(), rstd_.bytes()}) all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  double output(int64_t row, int64_t col) const {
    return shape_.in_place ? value_of(in_.get(row, col)) : value_of(out_.get(row, col));
  }

  std::string describe() const {
    std::ostringstream out;
    out << Op::name << " " << name(dtype_of<S>::value) << " to " << name(dtype_of<D>::value) << " " << shape_.rows
        << " x " << shape_.cols << ", gaps " << shape_.in_gap << " " << shape_.out_gap << ", shifts " << shape_.in_shift
        << " " << shape_.out_shift << (shape_.in_place ? ", in place" : "");
    return out.str();
  }

 private:
  auto sink() const {
    if (shape_.in_place) return Io::store(reinterpret_cast<D*>(in_.data()), in_.ld());
    return Io::store(out_.data(), out_.ld());
  }

  void remember() {
    in_.upload();
    given_.clear();
    for (int64_t r = 0; r < in_.rows(); ++r) {
      for (int64_t c = 0; c < in_.cols(); ++c) given_.push_back(in_.get(r, c));
    }
  }

  std::string verify_row(int64_t r) const {
    Row<C> x(static_cast<size_t>(shape_.cols));
    const S* given = given_.data() + r * shape_.cols;
    for (int64_t c = 0; c < shape_.cols; ++c) x[size_t(c)] = value_of(given[c]);
    const RowStatistics<C> statistics = op_.expect(x);
    const std::string problem = mismatch(r, x, [&](int64_t c) {
      if constexpr (sizeof(S) == sizeof(D)) {
        if (shape_.in_place) return k::bit_cast<D>(in_.get(r, c));
      }
      return out_.get(r, c);
    });
    if (!problem.empty()) return problem;
    // A row with infinities has no mean: infinity and NaN are both fine.
    const bool infinite = !std::isfinite(statistics.mean.v) && !std::isfinite(mean_.get(r, 0));
    if (Op::has_mean && !infinite && !within(mean_.get(r, 0), statistics.mean))
      return wrong("mean", r, mean_.get(r, 0), statistics.mean);
    if (Op::has_rstd && !within(rstd_.get(r, 0), statistics.rstd))
      return wrong("rstd", r, rstd_.get(r, 0), statistics.rstd);
    return "";
  }
  static std::string wrong(const char* what, int64_t row, C got, Real<C> want) {
    std::ostringstream out;
    out.precision(17);
    out << what << " of row " << row << ": got " << got << ", want " << want.v << " +- " << want.e;
    return out.str();
  }

  Shape shape_;
  Op op_;
  Guarded<S> in_;
  Guarded<D> out_;
  Guarded<C> mean_, rstd_;
  std::vector<S> given_;
};

// "" is no problem.
inline void expect_none(Tally& t, const std::string& problem) { t.expect(problem.empty(), "%s", problem.c_str()); }

}  // namespace test
