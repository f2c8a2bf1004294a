// Arguments that are refused, with the reason, before anything is launched; and empty calls.
#include "support/gpu.cuh"

using namespace test;

namespace {

constexpr int64_t kHuge = int64_t(1) << 62;

// Refused for a reason that names the culprit.
void refused(const k::Status& status, const char* culprit, k::Code code = k::Code::invalid) {
  INFO("wanted: " << culprit << "; got " << text(status));
  CHECK(status.code() == code);
  CHECK(std::string(status.reason()).find(culprit) != std::string::npos);
}

}  // namespace

TEST_CASE("status: softmax") {
  Stream stream;
  const int64_t rows = 4, cols = 16;
  Device<k::half> x(rows, cols, cols), y(rows, cols, cols);
  const auto call = [&](const k::half* in, int64_t in_ld, k::half* out, int64_t out_ld, int64_t r, int64_t c) {
    return k::softmax(stream, k::load(in, in_ld), k::store(out, out_ld), r, c);
  };
  refused(call(nullptr, cols, y.data(), cols, rows, cols), "load");
  refused(call(x.data(), cols, nullptr, cols, rows, cols), "store");
  refused(call(x.data(), -1, y.data(), cols, rows, cols), "load: the row stride");
  refused(call(x.data(), cols, y.data(), cols - 1, rows, cols), "store: the row stride");
  refused(call(x.data(), cols, y.data(), -cols, rows, cols), "store: the row stride");
  refused(call(x.data(), kHuge, y.data(), cols, rows, cols), "load: rows x row stride");
  refused(call(x.data(), cols, y.data(), kHuge, rows, cols), "store: rows x row stride");
  refused(call(x.data(), cols, y.data(), cols, kHuge, cols), "rows x row stride");
  refused(call(x.data(), cols, y.data(), cols, -1, cols), "rows");
  refused(call(x.data(), cols, y.data(), cols, rows, -1), "cols");
  refused(call(x.data(), kHuge / 64, y.data(), kHuge / 64, 1, (int64_t(1) << 30) + 1), "cols", k::Code::unsupported);
  refused(call(x.data(), kHuge / 64, y.data(), kHuge / 64, 1, kHuge / 64), "cols", k::Code::unsupported);

  // Empty calls are fine, whatever the pointers; negative sizes are not.
  CHECK(call(nullptr, 0, nullptr, 0, 0, cols));
  CHECK(call(nullptr, 0, nullptr, 0, rows, 0));
  CHECK(call(nullptr, 0, nullptr, 0, 0, 0));
  refused(call(nullptr, 0, nullptr, 0, 0, -1), "cols");
  refused(call(nullptr, 0, nullptr, 0, -1, 0), "rows");
  k::RowPlan plan;
  CHECK(k::row_plan(stream, k::Softmax{}, k::load(x.data(), cols), k::store(y.data(), cols), 0, cols, {}, plan));

  // One row has no use for a stride.
  randomize(x, 1);
  CHECK(call(x.data(), 0, y.data(), 0, 1, cols));
  stream.wait();
  CHECK(cudaGetLastError() == cudaSuccess);
  y.download();
  CHECK(y.intact());
}

TEST_CASE("status: nothing is launched for an empty or a refused call") {
  Stream stream;
  const k::half* x = nullptr;
  k::half* y = nullptr;
  const Graph graph(stream, [&] {
    CHECK(k::softmax(stream, k::load(x, 0), k::store(y, 0), 0, 10));
    CHECK(!k::softmax(stream, k::load(x, 0), k::store(y, 0), 10, 10));
  });
  size_t nodes = 1;
  check_cuda(cudaGraphGetNodes(graph, nullptr, &nodes));
  CHECK(nodes == 0);
}

// One composition with everything in it, and one thing wrong at a time.
TEST_CASE("status: layernorm and what is fused into it") {
  Stream stream;
  const int64_t rows = 4, cols = 16;
  Device<k::half> x(rows, cols, cols), res(rows, cols, cols), y(rows, cols, cols), z(rows, cols, cols);
  Device<float> bias(1, cols, cols), gamma(1, cols, cols), beta(1, cols, cols), each(rows, 1, 1);
  Device<bool> keep(2, cols, cols);

  struct Arguments {
    const k::half *x, *added;
    k::half *res, *y, *z;
    const float *bias, *gamma, *beta, *each;
    const bool* keep;
    int64_t ld = 16, added_ld = 16, res_ld = 16, y_ld = 16, z_ld = 16, keep_ld = 16;
    int64_t period = 2, q_len = 4, kv_len = 16;
    double eps = 1e-5;
  };
  const Arguments right{x.data(),    res.data(),   res.data(),  y.data(),    z.data(),
                        bias.data(), gamma.data(), beta.data(), each.data(), keep.data()};
  const auto call = [&](const Arguments& a) {
    const auto in = k::load(a.x, a.ld) | k::add(k::row(a.bias)) | k::mul(k::per_row(a.each)) |
                    k::add(k::load(a.added, a.added_ld)) | k::mask(k::cycle(k::load(a.keep, a.keep_ld), a.period)) |
                    k::causal(a.q_len, a.kv_len) | k::tee(a.res, a.res_ld);
    const auto out = k::affine(a.gamma, a.beta) | k::both(k::store(a.y, a.y_ld), k::relu() | k::store(a.z, a.z_ld));
    return k::layernorm(stream, in, out, rows, cols, k::LayerNorm{}.eps(a.eps));
  };
  const auto wrong = [&](auto change, const char* culprit) {
    Arguments a = right;
    change(a);
    refused(call(a), culprit);
  };
  wrong([](Arguments& a) { a.x = nullptr; }, "load: the pointer");
  wrong([](Arguments& a) { a.added = nullptr; }, "load: the pointer");
  wrong([](Arguments& a) { a.keep = nullptr; }, "load: the pointer");
  wrong([](Arguments& a) { a.bias = nullptr; }, "the pointer to a vector");
  wrong([](Arguments& a) { a.gamma = nullptr; }, "the pointer to a vector");
  wrong([](Arguments& a) { a.beta = nullptr; }, "the pointer to a vector");
  wrong([](Arguments& a) { a.each = nullptr; }, "per_row");
  wrong([](Arguments& a) { a.res = nullptr; }, "tee");
  wrong([](Arguments& a) { a.y = nullptr; }, "store: the pointer");
  wrong([](Arguments& a) { a.z = nullptr; }, "store: the pointer");
  wrong([](Arguments& a) { a.ld = -16; }, "load: the row stride");
  wrong([](Arguments& a) { a.added_ld = -1; }, "load: the row stride");
  wrong([](Arguments& a) { a.keep_ld = -1; }, "load: the row stride");
  wrong([](Arguments& a) { a.res_ld = 15; }, "tee: the row stride");
  wrong([](Arguments& a) { a.y_ld = 15; }, "store: the row stride");
  wrong([](Arguments& a) { a.z_ld = 0; }, "store: the row stride");
  wrong([](Arguments& a) { a.added_ld = kHuge; }, "load: rows x row stride");
  wrong([](Arguments& a) { a.keep_ld = kHuge; }, "load: rows x row stride");
  wrong([](Arguments& a) { a.res_ld = kHuge; }, "tee: rows x row stride");
  wrong([](Arguments& a) { a.z_ld = kHuge; }, "store: rows x row stride");
  wrong([](Arguments& a) { a.period = 0; }, "cycle");
  wrong([](Arguments& a) { a.period = -3; }, "cycle");
  wrong([](Arguments& a) { a.q_len = 0; }, "causal");
  wrong([](Arguments& a) { a.kv_len = -1; }, "causal");
  wrong([](Arguments& a) { a.eps = -1e-9; }, "eps");
  wrong([](Arguments& a) { a.eps = std::nan(""); }, "eps");
  stream.wait();
  CHECK((res.unchanged() && y.unchanged() && z.unchanged()));
  CHECK(call(right));
  stream.wait();
}

TEST_CASE("status: rmsnorm and quantize") {
  Stream stream;
  const int64_t rows = 4, cols = 16;
  Device<k::half> x(rows, cols, cols);
  Device<int8_t> q(rows, cols, cols);
  Device<float> scales(rows, 1, 1);
  const auto call = [&](int8_t* codes, int64_t ld, float* scale, double eps) {
    return k::rmsnorm(stream, k::load(x.data(), cols), k::quantize(codes, ld, scale), rows, cols,
                      k::RmsNorm{}.eps(eps));
  };
  refused(call(nullptr, cols, scales.data(), 1e-5), "quantize: the pointer");
  refused(call(q.data(), cols, nullptr, 1e-5), "scales");
  refused(call(q.data(), cols - 1, scales.data(), 1e-5), "quantize: the row stride");
  refused(call(q.data(), kHuge, scales.data(), 1e-5), "quantize: rows x row stride");
  refused(call(q.data(), cols, scales.data(), -1.0), "eps");
  refused(call(q.data(), cols, scales.data(), std::nan("")), "eps");
  stream.wait();
  CHECK((q.unchanged() && scales.unchanged()));
}
