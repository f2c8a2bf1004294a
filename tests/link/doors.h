// Every door of the CPU once, on small shapes with rests, against computations in double: for programs of several
// compilers and instruction sets. Products with weights of other types than half are code of the same functions, which
// is a third of what there is to compile: every_weight(), for what compilers are asked.
#pragma once

#include <kernels/append.h>
#include <kernels/cpu/attention.h>
#include <kernels/cpu/elementwise.h>
#include <kernels/cpu/matmul.h>
#include <kernels/cpu/norm_heads.h>
#include <kernels/cpu/router.h>
#include <kernels/rope.h>

#include "calls.h"

namespace {
namespace link {

template <class T>
std::vector<T> rounded(std::vector<float>& x) {
  std::vector<T> out;
  for (float& v : x) {
    out.push_back(kernels::convert<T>(v));
    v = kernels::convert<float>(out.back());
  }
  return out;
}

// y(m, n) = sum over k of x(m, k) * w(n, k), plus n / 8.
inline std::vector<double> product(const std::vector<float>& x, const std::vector<float>& w, int64_t m, int64_t n,
                                   int64_t depth) {
  std::vector<double> y;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = double(j) / 8;
      for (int64_t k = 0; k < depth; ++k) sum += double(x[size_t(i * depth + k)]) * w[size_t(j * depth + k)];
      y.push_back(sum);
    }
  }
  return y;
}

template <class X, class W>
void check_product(Verdict& verdict, const char* what, const X& source, const W& weights,
                   const std::vector<double>& want, int64_t m, int64_t n, int64_t depth) {
  namespace k = kernels;
  std::vector<float> y(size_t(m * n)), bias;
  for (int64_t j = 0; j < n; ++j) bias.push_back(float(j) / 8);
  const bool ok = bool(k::cpu::matmul(k::cpu::Exec{2}.least_work(0), source, weights,
                                      k::bias(bias.data()) | k::store(y.data(), n), {m, n, depth}));
  verdict.called(what, ok, y, want);
}

inline void check_products(Verdict& verdict) {
  namespace k = kernels;
  const int64_t n = 37, depth = 331;
  for (const int64_t m : {1, 3, 40}) {
    std::vector<float> x = input(m, depth), w = input(n, depth);
    const auto halves = rounded<k::half>(w);
    const auto in = k::load(x.data(), depth);
    check_product(verdict, "matmul, half", in, k::load(halves.data(), depth), product(x, w, m, n, depth), m, n, depth);
  }
}

inline void check_weights(Verdict& verdict) {
  namespace k = kernels;
  const int64_t n = 37, depth = 331;
  std::vector<float> x = input(2, depth), w = input(n, depth);
  const auto eighths = rounded<k::float8_e4m3>(w);
  check_product(verdict, "matmul, e4m3", k::load(x.data(), depth), k::load(eighths.data(), depth),
                product(x, w, 2, n, depth), 2, n, depth);

  // Code 3 in every place but those of multiples of 5, where it is 12: with its zero point 8 and its scale, -2.5 or 2.
  const int64_t even = 512;
  std::vector<float> xs = input(2, even), ws(size_t(n * even)), scales(size_t(n * even / 64), 0.5f),
                     zeros(scales.size(), 8.f);
  std::vector<uint32_t> codes(size_t(n * even / 8));
  for (size_t i = 0; i < ws.size(); ++i) {
    const uint32_t code = i % 5 == 0 ? 12 : 3;
    codes[i / 8] |= code << (i % 8 / 2 * 4 + i % 2 * 16);
    ws[i] = i % 5 == 0 ? 2.f : -2.5f;
  }
  const auto four =
      k::dequant(k::uint4(codes.data(), even), k::group_scales(scales.data(), even / 64, 64).zeros(zeros.data()));
  check_product(verdict, "matmul, uint4", k::load(xs.data(), even), four, product(xs, ws, 2, n, even), 2, n, even);
}

// The two best of five experts for each of three tokens, with a sigmoid; then a product of each expert with its rows,
// and their sum.
inline void check_router(Verdict& verdict) {
  namespace k = kernels;
  const int64_t tokens = 3, experts = 5, top_k = 2, cols = 24, rows = tokens * top_k;
  const std::vector<float> logits = {0.5f, 2.f,  1.f,  2.f,  -1.f, 3.f,  0.25f, 0.f,
                                     -2.f, 1.5f, -1.f, -2.f, -3.f, -4.f, -0.5f};
  const std::vector<float> x = input(tokens, cols), w = input(experts * cols, cols);
  const int chosen[] = {1, 3, 0, 4, 4, 0};
  std::vector<int32_t> ids(size_t(rows), -7), offsets(size_t(experts + 1)), order(ids), places(ids);
  std::vector<float> weights(static_cast<size_t>(rows)), between(size_t(rows * cols)), y(size_t(tokens * cols));
  std::vector<double> want(y.size(), 0.0);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t token = i / top_k, expert = chosen[i];
    const double share = 1 / (1 + std::exp(-double(logits[size_t(token * experts + expert)])));
    for (int64_t n = 0; n < cols; ++n) {
      double sum = 0;
      for (int64_t c = 0; c < cols; ++c)
        sum += double(x[size_t(token * cols + c)]) * w[size_t((expert * cols + n) * cols + c)];
      want[size_t(token * cols + n)] += share * sum;
    }
  }
  const k::cpu::Exec cx = k::cpu::Exec{2}.least_work(0);
  const k::RouterShape shape{tokens, experts, top_k};
  bool ok = bool(
      k::cpu::route(cx, k::load(logits.data(), experts), ids.data(), weights.data(), shape, k::Router{}.sigmoid()));
  ok = ok && k::cpu::sort_by_expert(cx, ids.data(), {offsets.data(), order.data(), places.data()}, shape);
  ok = ok && k::cpu::matmul(cx, k::gathered(k::load(x.data(), cols), order.data(), top_k), k::load(w.data(), cols),
                            k::store(between.data(), cols), {rows, cols, cols}, k::Groups{experts, offsets.data()});
  ok = ok && k::cpu::copy(cx, k::combined(k::load(between.data(), cols), places.data(), weights.data(), top_k),
                          k::store(y.data(), cols), tokens, cols);
  verdict.called("route, sort_by_expert", ok, y, want);
}

inline void check_rope(Verdict& verdict) {
  namespace k = kernels;
  const int64_t tokens = 3, dim = 8, cols = 2 * dim;
  const std::vector<float> x = input(tokens, cols);
  const std::vector<int32_t> positions = {5, 0, 1234};
  std::vector<float> frequencies(size_t(dim / 2)), y(x.size());
  k::rope_frequencies(frequencies.data(), int(dim), 1e4);
  std::vector<double> want;
  for (int64_t i = 0; i < tokens * cols; ++i) {
    const int64_t pair = i % (dim / 2), first = i - i % dim + pair;
    const double angle = double(float(positions[size_t(i / cols)]) * frequencies[size_t(pair)]);
    const double a = x[size_t(first)], b = x[size_t(first + dim / 2)];
    want.push_back(i == first ? a * std::cos(angle) - b * std::sin(angle) : b * std::cos(angle) + a * std::sin(angle));
  }
  const auto rope = k::rope(positions.data(), frequencies.data(), int(dim));
  const bool ok = bool(k::cpu::copy(k::cpu::Exec{2}.least_work(0), k::load(x.data(), cols) | rope,
                                    k::store(y.data(), cols), tokens, cols));
  verdict.called("copy, rope", ok, y, want);
}

// Two heads in each row: one normalized and turned by a quarter of a circle, where each pair (a, b) becomes (-b, a),
// the other left alone.
inline void check_norm_heads(Verdict& verdict) {
  namespace k = kernels;
  const int64_t tokens = 3, dim = 16, cols = 2 * dim;
  const std::vector<float> x = input(tokens, cols);
  const std::vector<int32_t> positions(size_t(tokens), 1);
  const std::vector<float> frequencies(size_t(dim / 2), 1.57079633f);
  std::vector<float> y(x.size()), weight;
  for (int64_t i = 0; i < dim; ++i) weight.push_back(float(i) / 4 - 1);
  std::vector<double> want;
  for (int64_t i = 0; i < tokens * cols; ++i) {
    const int64_t head = i - i % dim, at = i % dim, other = (at + dim / 2) % dim;
    double squares = 0;
    for (int64_t j = 0; j < dim; ++j) squares += double(x[size_t(head + j)]) * x[size_t(head + j)];
    const double turned = (at < dim / 2 ? -1 : 1) * x[size_t(head + other)] * double(weight[size_t(other)]) /
                          std::sqrt(squares / double(dim) + 1e-6);
    want.push_back(head % cols == 0 ? turned : double(x[size_t(i)]));
  }
  const auto first = k::store(y.data(), cols), second = k::store(y.data() + dim, cols);
  const auto rope = k::rope(positions.data(), frequencies.data(), int(dim));
  const bool ok = bool(k::cpu::norm_heads(
      k::cpu::Exec{2}.least_work(0), k::load(x.data(), cols),
      k::qkv(k::affine(k::each_head(weight.data(), dim)) | rope | first, dim, second, dim, second, 0),
      {tokens, 2, dim, 1}, k::RmsNorm{}.eps(1e-6)));
  verdict.called("norm_heads", ok, y, want);
}

// A flat tensor, codes of groups, and rows of a table.
inline void check_copies(Verdict& verdict) {
  namespace k = kernels;
  const int64_t rows = 3, cols = 37, n = rows * cols;
  const k::cpu::Exec cx = k::cpu::Exec{2}.least_work(0);
  const std::vector<float> x = input(rows, cols);
  const std::vector<int32_t> ids = {2, 0, 2};
  std::vector<float> y(x.size()), scales(size_t(rows * 3));
  std::vector<int8_t> codes(x.size());
  std::vector<double> active, back, chosen;
  for (const float v : x) active.push_back(v / (1 + std::exp(-double(v))));
  const bool ok = bool(k::cpu::copy(cx, k::load(x.data()) | k::silu(), k::store(y.data()), n));
  verdict.called("copy, silu", ok, y, active);

  const bool coded = bool(
      k::cpu::copy(cx, k::load(x.data(), cols), k::quantize(codes.data(), cols, scales.data(), 3, 16), rows, cols));
  const auto decoded = k::dequant(k::load(codes.data(), cols), k::group_scales(scales.data(), 3, 16));
  const bool read = bool(k::cpu::copy(cx, decoded, k::store(y.data(), cols), rows, cols));
  for (int64_t i = 0; i < n; ++i)
    back.push_back(double(codes[size_t(i)]) * scales[size_t(i / cols * 3 + i % cols / 16)]);
  for (int64_t i = 0; i < n; ++i) {
    if (std::fabs(back[size_t(i)] - x[size_t(i)]) > 0.51 * scales[size_t(i / cols * 3 + i % cols / 16)])
      back[size_t(i)] = 1e9;
  }
  verdict.called("copy, codes", coded && read, y, back);

  for (int64_t i = 0; i < n; ++i) chosen.push_back(x[size_t(ids[size_t(i / cols)] * cols + i % cols)]);
  const bool gathered =
      bool(k::cpu::copy(cx, k::embed(k::load(x.data(), cols), ids.data(), rows), k::store(y.data(), cols), rows, cols));
  verdict.called("copy, embed", gathered, y, chosen);
}

// Two queries for each of two sequences, four heads of which two share keys.
inline void check_attention(Verdict& verdict) {
  namespace k = kernels;
  const int64_t batch = 2, queries = 2, heads = 4, kv_heads = 2, dim = 24, keys = 70, width = heads * dim;
  const std::vector<float> q = input(batch * queries, width);
  std::vector<float> keys_as_floats = input(batch * keys, kv_heads * dim), values = keys_as_floats;
  const auto kept = rounded<k::half>(keys_as_floats);
  for (float& v : values) v = 1 - v;
  const auto kept_values = rounded<k::half>(values);
  std::vector<double> want;
  for (int64_t row = 0; row < batch * queries * heads; ++row) {
    const int64_t b = row / heads / queries, query = row / heads % queries, seen = keys - queries + query + 1;
    const auto at = [&](int64_t key) {
      return size_t(((b * keys + key) * kv_heads + row % heads / (heads / kv_heads)) * dim);
    };
    std::vector<double> sums(size_t(dim), 0.0);
    double total = 0;
    for (int64_t key = 0; key < seen; ++key) {
      double logit = 0;
      for (int64_t c = 0; c < dim; ++c) logit += double(q[size_t(row * dim + c)]) * keys_as_floats[at(key) + size_t(c)];
      const double weight = std::exp(logit / std::sqrt(double(dim)));
      total += weight;
      for (int64_t c = 0; c < dim; ++c) sums[size_t(c)] += weight * values[at(key) + size_t(c)];
    }
    for (const double sum : sums) want.push_back(sum / total);
  }

  const k::cpu::Exec cx = k::cpu::Exec{2}.least_work(0);
  const k::AttentionShape shape{batch, queries, heads, kv_heads, dim};
  const auto kv =
      k::dense_kv(k::nhd(kept.data(), keys, kv_heads, dim), k::nhd(kept_values.data(), keys, kv_heads, dim), keys);
  std::vector<float> o(q.size()), lse(size_t(2 * batch * queries * heads)), twice(2 * q.size());
  std::vector<float> memory(k::cpu::decode_workspace_bytes(shape) / sizeof(float));
  const auto in = k::load(q.data(), width);
  verdict.called("attention", bool(k::cpu::attention(cx, in, kv, k::store(o.data(), width), shape, k::causal())), o,
                 want);
  const k::Workspace workspace{memory.data(), memory.size() * sizeof(float)};
  verdict.called("decode", bool(k::cpu::decode(cx, in, kv, k::store(o.data(), width), shape, k::causal(), workspace)),
                 o, want);
  // Two parts that are the same weigh the same.
  std::copy(o.begin(), o.end(), std::copy(o.begin(), o.end(), twice.begin()));
  const bool ok = bool(k::cpu::merge_states(cx, k::load(twice.data(), width), k::load(lse.data(), heads),
                                            k::store(o.data(), width), {2, batch * queries, heads, dim}));
  verdict.called("merge_states", ok, o, want);
}

}  // namespace link

// The number of results that are wrong.
inline int every_door(const char* unit) {
  const int wrong = cpu_calls(unit);
  link::Verdict verdict(unit);
  link::check_products(verdict);
  link::check_router(verdict);
  link::check_rope(verdict);
  link::check_norm_heads(verdict);
  link::check_copies(verdict);
  link::check_attention(verdict);
  return wrong + verdict.failures();
}
inline int every_weight(const char* unit) {
  link::Verdict verdict(unit);
  link::check_weights(verdict);
  return verdict.failures();
}

}  // namespace
