// The CPU versions as a second oracle: the identical functor objects, over memory that both can reach.
#include "support/gpu.cuh"

#include <kernels/cpu/layernorm.h>
#include <kernels/cpu/rmsnorm.h>
#include <kernels/cpu/softmax.h>

using namespace test;

namespace {

constexpr int64_t kRows = 7;
constexpr int64_t kCols[] = {1, 48, 257, 1000, 5000, 20001};

template <class T>
void fill(Pinned<T>& m, uint64_t seed) {
  RandomRows rows(seed, /*holes*/ false);
  for (int64_t r = 0; r < m.rows(); ++r) {
    rows.row(r, m.cols(), [&](int64_t c, double x) { m.set(r, c, make<T>(x)); });
  }
  m.upload();
}

// The outputs of both, downloaded by turns: values in [0, 1] or normalized ones, equal up to rounding.
template <class T>
std::vector<double> take(Pinned<T>& m) {
  m.download();
  CHECK(m.intact());
  std::vector<double> values;
  for (int64_t r = 0; r < m.rows(); ++r) {
    for (int64_t c = 0; c < m.cols(); ++c) values.push_back(value_of(m.get(r, c)));
  }
  return values;
}

std::string difference(const std::vector<double>& gpu, const std::vector<double>& cpu, double relative,
                       double absolute) {
  for (size_t i = 0; i < gpu.size(); ++i) {
    if (std::fabs(gpu[i] - cpu[i]) <= relative * std::fabs(cpu[i]) + absolute) continue;
    std::ostringstream text;
    text.precision(9);
    text << "element " << i << ": GPU " << gpu[i] << ", CPU " << cpu[i];
    return text.str();
  }
  return "";
}

}  // namespace

TEST_CASE("twin: softmax, scaled and masked") {
  Stream stream;
  for (const int64_t cols : kCols) {
    Pinned<k::half> x(kRows, cols, cols + 3);
    Pinned<bool> keep(1, cols, cols);
    Pinned<float> y(kRows, cols, cols);
    fill(x, 1);
    for (int64_t c = 0; c < cols; ++c) keep.set(0, c, c % 5 != 1);
    keep.upload();
    const auto in = k::load(x.data(), x.ld()) | k::scale(0.7) | k::mask(k::row(keep.data()));
    const auto out = k::store(y.data(), y.ld());
    REQUIRE(k::softmax(stream, in, out, kRows, cols));
    stream.wait();
    const auto gpu = take(y);
    REQUIRE(k::cpu::softmax(k::cpu::Exec{}, in, out, kRows, cols));
    INFO(cols << " columns");
    CHECK(difference(gpu, take(y), 1e-5, 1e-30) == "");
  }
}

TEST_CASE("twin: bias, residual, tee in place and layernorm") {
  Stream stream;
  for (const int64_t cols : kCols) {
    Pinned<k::bfloat16> x(kRows, cols, cols);
    Pinned<float> res(kRows, cols, cols + 1), bias(1, cols, cols), gamma(1, cols, cols), beta(1, cols, cols);
    Pinned<float> y(kRows, cols, cols), mean(kRows, 1, 1), rstd(kRows, 1, 1);
    fill(x, 1);
    fill(bias, 2);
    fill(gamma, 3);
    fill(beta, 4);
    const auto in = k::load(x.data(), x.ld()) | k::add(k::row(bias.data())) | k::add(k::load(res.data(), res.ld())) |
                    k::tee(res.data(), res.ld());
    const auto out = k::affine(gamma.data(), beta.data()) | k::store(y.data(), y.ld());
    const auto options = k::LayerNorm{}.mean(mean.data()).rstd(rstd.data());
    INFO(cols << " columns");
    fill(res, 5);
    REQUIRE(k::layernorm(stream, in, out, kRows, cols, options));
    stream.wait();
    const auto gpu_y = take(y), gpu_res = take(res), gpu_mean = take(mean), gpu_rstd = take(rstd);
    fill(res, 5);
    REQUIRE(k::cpu::layernorm(k::cpu::Exec{}, in, out, kRows, cols, options));
    CHECK(difference(gpu_res, take(res), 0, 0) == "");
    CHECK(difference(gpu_y, take(y), 2e-5, 2e-4) == "");  // single outliers reach sqrt(cols)
    CHECK(difference(gpu_mean, take(mean), 1e-6, 1e-5) == "");
    CHECK(difference(gpu_rstd, take(rstd), 1e-5, 0) == "");
  }
}

// A code may fall to either side of a tie.
TEST_CASE("twin: rmsnorm to int8") {
  Stream stream;
  for (const int64_t cols : kCols) {
    Pinned<k::half> x(kRows, cols, cols);
    Pinned<float> gamma(1, cols, cols), scales(kRows, 1, 1);
    Pinned<int8_t> q(kRows, cols, cols);
    fill(x, 1);
    fill(gamma, 2);
    const auto in = k::load(x.data(), x.ld());
    const auto out = k::affine(gamma.data()) | k::gelu() | k::quantize(q.data(), q.ld(), scales.data());
    INFO(cols << " columns");
    REQUIRE(k::rmsnorm(stream, in, out, kRows, cols));
    stream.wait();
    const auto gpu_q = take(q), gpu_scales = take(scales);
    REQUIRE(k::cpu::rmsnorm(k::cpu::Exec{}, in, out, kRows, cols));
    const auto cpu_q = take(q);
    CHECK(difference(gpu_scales, take(scales), 1e-5, 0) == "");
    CHECK(difference(gpu_q, cpu_q, 0, 1) == "");
    size_t apart = 0;
    for (size_t i = 0; i < gpu_q.size(); ++i) apart += gpu_q[i] != cpu_q[i];
    CHECK(apart * 1000 <= gpu_q.size());
  }
}
