// The CPU versions as a second oracle: the identical functor objects, over memory that both can reach.
#include "support/gpu.cuh"

#include <kernels/append.h>
#include <kernels/elementwise.cuh>
#include <kernels/cpu/elementwise.h>
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

TEST_CASE("twin: keys appended with the scales that are found for them") {
  Stream stream;
  const int64_t heads = 3, page = 4, pages = 3, blocks = 6;
  for (const int64_t dim : {8, 20, 64, 128, 576}) {
    Pinned<k::half> x(kRows, heads * dim, heads * dim + 8);
    Pinned<int8_t> codes(blocks * page * heads, dim, dim);
    Pinned<float> scales(blocks * page * heads, 1, 1);
    Pinned<int32_t> positions(1, kRows, kRows), sequences(1, kRows, kRows), table(1, 2 * pages, 2 * pages);
    fill(x, 1);
    for (int64_t r = 0; r < kRows; ++r) {
      const int64_t left_out = r == 3 ? -1 : pages * page;  // before and behind the cache
      positions.set(0, r, int32_t(r == 3 || r == 5 ? left_out : 3 * r % 10)), sequences.set(0, r, int32_t(r % 2));
    }
    for (int64_t i = 0; i < 2 * pages; ++i) table.set(0, i, int32_t((5 * i + 2) % blocks));
    positions.upload(), sequences.upload(), table.upload();
    const auto side = k::nhd(codes.data(), page, heads, dim).scales(scales.data(), page * heads, heads, 1);
    const auto kv = k::paged_kv(side, side, k::pages(table.data(), pages, page), 10);
    const auto out = k::append_keys(kv, k::AppendAt(positions.data(), sequences.data()), dim, scales.data());
    const auto in = k::load(x.data(), x.ld()) | k::scale(0.5);
    const auto clear = [&] {
      for (int64_t r = 0; r < blocks * page * heads; ++r) {
        scales.set(r, 0, -7.f);
        for (int64_t c = 0; c < dim; ++c) codes.set(r, c, int8_t(99));
      }
      codes.upload(), scales.upload();
    };
    INFO("heads of " << dim);
    clear();
    REQUIRE(k::copy(stream, in, out, kRows, heads * dim));
    stream.wait();
    const auto gpu = take(codes), gpu_scales = take(scales);
    clear();
    REQUIRE(k::cpu::copy(k::cpu::Exec{1}, in, out, kRows, heads * dim));
    CHECK(difference(gpu, take(codes), 0, 1) == "");  // a code may fall to either side of a tie
    CHECK(difference(gpu_scales, take(scales), 1e-6, 0) == "");
  }
}
