// Loading a model: checks the options, finds and checks the tensors of the files, and converts or copies them to the
// device. model_memory.cpp plans the memory.
#include <kernels/cpu/exec.h>
#include <algorithm>
#include <atomic>
#include <cmath>

#include "model.h"

namespace llm {

namespace {

// `rows` rows of a matrix, from row `first` on.
Matrix rows_of(const Matrix& all, int64_t first, int64_t rows) {
  Matrix out = all;
  out.rows = rows;
  out.data = static_cast<const char*>(all.data) + weight_bytes(all.type, first, all.cols);
  if (all.scales != nullptr) out.scales = static_cast<const char*>(all.scales) + scale_bytes(all.type, first, all.cols);
  return out;
}

}  // namespace

// Finds and checks tensors, whose names it maps to the weights of the model, and brings them to the device. With
// only_plan it only adds up bytes.
class Model::Loader {
 public:
  Loader(Model& model, const Weights& files, const Progress& progress, bool only_plan)
      : model_(model), files_(files), progress_(progress), only_plan_(only_plan), all_(double(files.bytes()) + 1) {}

  // Loads every tensor that config.json implies. Files with other tensors are refused.
  void load() {
    model_.zeros_ = floats(
        std::vector<float>(size_t(std::max({c.vocabulary, c.hidden, c.inner, nq, c.experts, c.shared_inner})), 0.f));
    embedding();
    for (size_t i = 0; i < c.layers.size(); ++i) {
      const std::string number = std::to_string(i) + ".";
      if (gpt2) gpt2_layer(model_.layers_[i], prefix_ + "h." + number);
      else layer(model_.layers_[i], prefix_ + "layers." + number, c.layers[i].experts);
    }
    head();
    ignore_others();
    if (const std::string name = files_.unread(); !name.empty())
      throw Error("unknown tensor ", shown(name), " in a model of type ", c.architecture);
  }

 private:
  // NAME.weight, rows x cols weights. transposed: the file has them as cols x rows. quantize: whether --weights of
  // fewer than 16 bits apply. as: the Type that the matrix must have, or -1.
  Matrix matrix(const std::string& name, int64_t rows, int64_t cols, bool quantize = true, bool transposed = false,
                int as = -1) {
    const std::string full = name + ".weight";
    const Tensor& tensor =
        files_.get(full, transposed ? std::vector<int64_t>{cols, rows} : std::vector<int64_t>{rows, cols});
    return joined(full, {{&tensor, 0, rows}}, cols, 1, quantize, transposed, as);
  }

  // One matrix from rows of several tensors, one below the other, as experts need it. share: the part of it that a
  // token reads.
  struct Slice {
    const Tensor* tensor;
    int64_t first, rows;
  };
  Matrix joined(const std::string& name, const std::vector<Slice>& parts, int64_t cols, double share,
                bool quantize = true, bool transposed = false, int as = -1) {
    const Tensor& tensor = *parts[0].tensor;
    const Type type = as >= 0 ? Type(as) : type_of(name, tensor.type, cols, quantize);
    Matrix out{"", "", 0, cols, type};  // in a plan, pointers only have to be other than null
    for (const Slice& part : parts) out.rows += part.rows, count(part.tensor->type, type, quantize);
    const size_t bytes = llm::weight_bytes(type, out.rows, cols), scales = scale_bytes(type, out.rows, cols);
    model_.weights_per_token_ += size_t(share * double(bytes + scales)),
        model_.weights_count_ += size_t(share * double(out.rows * cols));

    const bool as_it_is = type == tensor.type && !transposed && parts.size() == 1;
    const unsigned char* const data = tensor.data + llm::weight_bytes(tensor.type, parts[0].first, cols);
    if (as_it_is && reinterpret_cast<uintptr_t>(data) % size_t(bits_of(type) / 8) == 0 && model_.device_.is_host()) {
      model_.plan_.mapped += bytes;
      out.data = data, out.scales = nullptr;
    } else {
      model_.plan_.weights += bytes + scales;
      if (only_plan_) return out;
      if (as_it_is) out.data = keep(data, bytes), out.scales = nullptr;
      else convert(name, parts, transposed, out, std::vector<char>(bytes), std::vector<char>(scales));
    }
    for (const Slice& part : parts) done(llm::weight_bytes(part.tensor->type, part.rows, cols));
    return out;
  }

  // A vector as floats on the device, with `plus` added to each.
  const float* vector(const std::string& name, int64_t n, float plus = 0) {
    const Tensor& tensor = files_.get(name, {n});
    std::vector<float> values(static_cast<size_t>(n));
    to_floats(tensor.type, tensor.data, values.data(), n);
    for (float& value : values) value += plus;
    done(tensor.bytes);
    return floats(values);
  }
  const float* floats(const std::vector<float>& values) {
    model_.plan_.weights += values.size() * 4;
    return only_plan_ ? &nothing_ : static_cast<const float*>(keep(values.data(), values.size() * 4));
  }

  void done(size_t bytes) {
    done_ += double(bytes);
    if (progress_ && !only_plan_) progress_(std::min(1.0, done_ / all_));
  }
  bool has(Type type) const { return model_.device_.products(type) != nullptr; }
  // The type that --weights asks for, or -1.
  int wanted(bool quantize) const {
    const int type = model_.options_.weights;
    return type >= 0 && !quantize && bits_of(Type(type)) < 16 ? -1 : type;
  }
  // The type that weights get on the device if the file has them in the type `stored`.
  Type type_of(const std::string& name, Type stored, int64_t cols, bool quantize) const {
    const int asked = wanted(quantize),
              type = type_on_device(stored, asked, model_.device_.rows().activations, [&](Type t) { return has(t); });
    const auto types = [&] { return names_of([&](Type t) { return has(t); }) + " (set by -DKERNELS_LLM_WEIGHTS)"; };
    if (type < 0 && asked >= 0)
      throw Error("--weights ", name_of(Type(asked)), ": not compiled in for this device, which has ", types());
    if (type < 0)
      throw Error(name, ": stored in ", name_of(stored), ", but this device has no type of 16 or 32 bits, only ",
                  types());
    if (Type(type) == Type::i4 && cols % kGroup != 0)
      throw Error(name, ": ", cols, " columns are not a multiple of ", kGroup, " as int4 needs; try --weights int8");
    return Type(type);
  }
  void count(Type stored, Type type, bool quantize) {
    if (wanted(quantize) < 0 && type != stored && !has(stored)) ++model_.plan_.changed[{stored, type}];
  }
  const void* keep(const void* from, size_t bytes) {
    model_.memory_.emplace_back(model_.device_, int64_t(bytes), "weights");
    model_.memory_.back().upload(static_cast<const char*>(from), bytes);
    return model_.memory_.back();
  }
  // Converts rows of tensors to a matrix of another type.
  void convert(const std::string& name, const std::vector<Slice>& parts, bool transposed, Matrix& out,
               std::vector<char> data, std::vector<char> scales) {
    int64_t to = 0;
    for (const Slice& part : parts) {
      convert(name, part, transposed, out, data.data() + llm::weight_bytes(out.type, to, out.cols),
              scales.data() + scale_bytes(out.type, to, out.cols));
      to += part.rows;
    }
    out.data = keep(data.data(), data.size());
    out.scales = scales.empty() ? nullptr : keep(scales.data(), scales.size());
  }
  // Each thread converts a few rows at a time, so that a large matrix is never held in floats as a whole.
  void convert(const std::string& name, const Slice& part, bool transposed, const Matrix& out, char* data,
               char* scales) const {
    const Type from = part.tensor->type;
    const int64_t size = bits_of(from) / 8, cols = out.cols,
                  some = std::max<int64_t>(1, (int64_t(1) << 18) / std::max<int64_t>(1, cols));
    // Quantizing to 8 or 4 bits would turn infinities and NaN into ordinary numbers, and hide that the file is broken.
    // The largest number of fp16 is 65504; numbers below 65520 are rounded to it.
    const bool codes = bits_of(out.type) < 16, half = out.type == Type::f16;
    std::atomic<float> wrong{0};
    const auto team = kernels::cpu::Exec{model_.device_.place().threads}.team().for_work(double(part.rows * cols));
    kernels::detail::host::parallel_shares(team, part.rows, [&](int64_t begin, int64_t end) {
      std::vector<float> values(size_t(std::min(some, end - begin) * cols));
      for (int64_t row = begin; row < end; row += some) {
        const int64_t n = std::min(some, end - row), first = part.first + row;
        if (!transposed) to_floats(from, part.tensor->data + first * cols * size, values.data(), n * cols);
        for (int64_t col = 0; transposed && col < cols; ++col) {
          for (int64_t i = 0; i < n; ++i)
            to_floats(from, part.tensor->data + (col * out.rows + first + i) * size, &values[size_t(i * cols + col)],
                      1);
        }
        for (int64_t i = 0; i < n * cols; ++i) {
          const float x = values[size_t(i)];
          if (std::isfinite(x) ? half && std::fabs(x) >= 65520 : codes) wrong = x;
        }
        from_floats(values.data(), n, cols, out.type, data + llm::weight_bytes(out.type, row, cols),
                    scales + scale_bytes(out.type, row, cols));
      }
    });
    if (wrong == 0) return;
    if (codes) throw Error(name, ": an infinite or NaN weight cannot be quantized to ", name_of(out.type));
    throw Error(name, ": ", wrong, " is beyond the largest fp16 number, 65504; ",
                has(Type::bf16) ? "try --weights bf16" : "bf16 is not compiled in (set by -DKERNELS_LLM_WEIGHTS)");
  }

  // ---- the tensors of each architecture

  Norm norm(const std::string& name, int64_t n) {
    return {vector(name + ".weight", n, c.norm_plus_one ? 1.f : 0.f),
            c.layer_norm ? vector(name + ".bias", n) : nullptr, c.eps, c.layer_norm};
  }
  const float* bias(bool there, const std::string& name, int64_t n) {
    return there ? vector(name + ".bias", n) : model_.zeros_;
  }
  QkvWeights parts_of(const Matrix& all) const {
    return {rows_of(all, 0, nq), rows_of(all, nq, nk), rows_of(all, nq + nk, nk),
            model_.zeros_,       model_.zeros_,        model_.zeros_};
  }

  // Comes before the layers, because the prefix of the table's name is theirs, too.
  void embedding() {
    const std::string table = gpt2 ? "wte" : "embed_tokens";
    prefix_ = gpt2 ? "transformer." : "model.";
    for (const char* other : {"", "transformer.", "model.", "language_model.model.", "model.language_model."}) {
      if (files_.has(other + table + ".weight")) prefix_ = other;
    }
    model_.embedding_ = matrix(prefix_ + table, c.vocabulary, c.hidden, false);
    if (gpt2) {  // must have the type of the table, since one call reads both
      model_.places_ = matrix(prefix_ + "wpe", c.positions, c.hidden, false, false, int(model_.embedding_.type));
    }
    // A token reads one row of the table, unless the table is the head as well.
    if (!c.tied) model_.weights_per_token_ = model_.weights_count_ = 0;
  }

  void gpt2_layer(Layer& l, const std::string& at) {
    l.attention_norm = norm(at + "ln_1", c.hidden);
    l.mlp_norm = norm(at + "ln_2", c.hidden);
    l.qkv = parts_of(matrix(at + "attn.c_attn", nq + 2 * nk, c.hidden, true, true));
    const float* const biases = vector(at + "attn.c_attn.bias", nq + 2 * nk);
    l.qkv.q_bias = biases, l.qkv.k_bias = biases + nq, l.qkv.v_bias = biases + nq + nk;
    l.output = matrix(at + "attn.c_proj", c.hidden, nq, true, true);
    l.output_bias = vector(at + "attn.c_proj.bias", c.hidden);
    l.up = matrix(at + "mlp.c_fc", c.inner, c.hidden, true, true);
    l.up_bias = vector(at + "mlp.c_fc.bias", c.inner);
    l.down = matrix(at + "mlp.c_proj", c.hidden, c.inner, true, true);
    l.down_bias = vector(at + "mlp.c_proj.bias", c.hidden);
    for (const char* mask : {"attn.bias", "attn.masked_bias"}) files_.ignore(at + mask);
  }

  void layer(Layer& l, const std::string& at, bool experts) {
    const std::string attention = at + "self_attn.", mlp = at + "mlp.";
    l.attention_norm = norm(at + "input_layernorm", c.hidden);
    l.mlp_norm = norm(at + (c.post_norms ? "pre_feedforward_layernorm" : "post_attention_layernorm"), c.hidden);
    if (c.post_norms) {
      l.after_attention = norm(at + "post_attention_layernorm", c.hidden);
      l.after_mlp = norm(at + "post_feedforward_layernorm", c.hidden);
    }
    if (c.head_norms)
      l.q_norm = norm(attention + "q_norm", c.head_dim), l.k_norm = norm(attention + "k_norm", c.head_dim);
    l.output = matrix(attention + "o_proj", c.hidden, nq);
    l.output_bias = bias(c.output_bias, attention + "o_proj", c.hidden);
    l.up_bias = l.down_bias = model_.zeros_;
    if (experts) all_experts(l, at, mlp);
    else feed_forward(l, mlp, c.inner);
    if (c.fused) {
      l.qkv = parts_of(matrix(attention + "qkv_proj", nq + 2 * nk, c.hidden));
    } else {
      const auto part = [&](const char* name, int64_t rows) { return matrix(attention + name, rows, c.hidden); };
      const auto part_bias = [&](const char* name, int64_t rows) { return bias(c.qkv_bias, attention + name, rows); };
      l.qkv = {part("q_proj", nq),      part("k_proj", nk),      part("v_proj", nk),
               part_bias("q_proj", nq), part_bias("k_proj", nk), part_bias("v_proj", nk)};
    }
    files_.ignore(attention + "rotary_emb.inv_freq");
  }

  void feed_forward(Layer& l, const std::string& at, int64_t inner) {
    if (c.fused) {
      const Matrix both = matrix(at + "gate_up_proj", 2 * inner, c.hidden);
      l.gate = rows_of(both, 0, inner), l.up = rows_of(both, inner, inner);
    } else {
      l.gate = matrix(at + "gate_proj", inner, c.hidden);
      l.up = matrix(at + "up_proj", inner, c.hidden);
    }
    l.down = matrix(at + "down_proj", c.hidden, inner);
  }

  // Mixtral uses other names; transformers 5 may write one tensor for all experts.
  void all_experts(Layer& l, const std::string& at, const std::string& mlp) {
    const bool mixtral = files_.has(at + "block_sparse_moe.gate.weight");
    const std::string base = mixtral ? at + "block_sparse_moe." : mlp, all = base + "experts.";
    const double share = double(c.experts_per_token) / double(c.experts);
    l.router = matrix(base + "gate", c.experts, c.hidden, false);
    std::vector<Slice> gate, up, down;
    const bool fused = files_.has(all + "gate_up_proj");
    const int64_t inner = c.expert_inner;
    for (int64_t e = 0; e < c.experts; ++e) {
      // All rows of the expert's own tensor, or rows from `first` on of the tensor for all experts.
      const auto part = [&](const char* own, const char* of_all, int64_t all_rows, int64_t first, int64_t rows,
                            int64_t cols) {
        if (fused) return Slice{&files_.get(all + of_all, {c.experts, all_rows, cols}), first, rows};
        return Slice{&files_.get(concat(all, e, ".", own, ".weight"), {rows, cols}), 0, rows};
      };
      gate.push_back(part(mixtral ? "w1" : "gate_proj", "gate_up_proj", 2 * inner, 2 * e * inner, inner, c.hidden));
      up.push_back(part(mixtral ? "w3" : "up_proj", "gate_up_proj", 2 * inner, (2 * e + 1) * inner, inner, c.hidden));
      down.push_back(part(mixtral ? "w2" : "down_proj", "down_proj", c.hidden, e * c.hidden, c.hidden, inner));
    }
    l.expert_gate = joined(all, gate, c.hidden, share), l.expert_up = joined(all, up, c.hidden, share);
    l.expert_down = joined(all, down, c.expert_inner, share);
    if (c.shared_inner > 0) {
      l.shared_gate = matrix(mlp + "shared_expert_gate", 1, c.hidden, false);
      feed_forward(l, mlp + "shared_expert.", c.shared_inner);
    }
  }

  // The flag of config.json decides: a head in the files of a tied model is not read.
  void head() {
    model_.last_norm_ = norm(prefix_ + (gpt2 ? "ln_f" : "norm"), c.hidden);
    files_.ignore(prefix_ + "rotary_emb.inv_freq");
    if (c.tied) {
      model_.head_ = model_.embedding_;
      for (const char* name : {"lm_head.weight", "model.lm_head.weight", "language_model.lm_head.weight"})
        files_.ignore(name);
    } else {
      const bool inner = prefix_.rfind("language_model.", 0) == 0;
      model_.head_ = matrix(inner ? "language_model.lm_head" : "lm_head", c.vocabulary, c.hidden, false);
    }
  }

  // The parts of models that read images.
  void ignore_others() {
    for (const auto& item : files_.all()) {
      for (const char* other :
           {"vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector."}) {
        if (item.first.rfind(other, 0) == 0) files_.ignore(item.first);
      }
    }
  }

  Model& model_;
  const Weights& files_;
  const Progress& progress_;
  bool only_plan_;
  double all_, done_ = 0;
  float nothing_ = 0;
  const Config& c = model_.config_;
  const int64_t nq = c.heads * c.head_dim, nk = c.kv_heads * c.head_dim;
  const bool gpt2 = c.learned_positions;
  std::string prefix_;
};

Model::Model(const Config& config, const Weights& files, Device& device, const ModelOptions& options,
             const Progress& progress, bool only_plan)
    : config_(config), device_(device), options_(options) {
  check_options();
  place_ = device_.place(), place_.invariant = options_.batch_invariant;
  layers_.resize(config_.layers.size());
  const auto load = [&](bool plans) {
    plan_ = {}, weights_per_token_ = weights_count_ = 0;
    Loader(*this, files, progress, plans).load();
  };
  load(true);
  plan_memory();
  if (only_plan) return;
  const Plan plan = plan_;
  load(false);
  plan_ = plan;
  allocate(false);
  plan_walk();
}

Plan Model::plan(const Config& config, const Weights& files, Device& device, const ModelOptions& options) {
  return Model(config, files, device, options, {}, true).plan_;
}

void Model::check_options() {
  const Config& c = config_;
  const Type inputs = Type(options_.inputs);
  const auto refuse_if = [](bool wrong, const auto&... why) {
    if (wrong) throw Error(why...);
  };
  // --inputs would multiply many rows in another way than few, and --lookup would split keys in another way.
  refuse_if(options_.batch_invariant && options_.inputs >= 0, "--batch-invariant cannot be used with --inputs");
  refuse_if(options_.batch_invariant && options_.guesses > 0, "--batch-invariant cannot be used with --lookup");
  if (options_.chunk == 0) options_.chunk = device_.chunk();
  if (options_.sinks >= 0) {
    refuse_if(c.learned_positions, "--sinks: not supported for models with learned positions");
    refuse_if(c.lengths_matter(), "--sinks: not supported for models whose RoPE depends on the sequence length");
  }
  if (options_.inputs >= 0) {
    refuse_if(options_.weights != options_.inputs || bits_of(inputs) != 8, "--inputs ", name_of(inputs),
              ": needs --weights ", name_of(inputs));
    const ProductCalls* const calls = device_.products(inputs);
    refuse_if(calls != nullptr && !calls->takes_codes(device_.place()), "--inputs ", name_of(inputs),
              ": not supported by this GPU or this build, needs sm_90a; use auto");
  }
  refuse_if(options_.guesses > 0 && options_.sequences > 1, "--lookup: not supported for batches");
  refuse_if(options_.guesses > 0 && options_.sinks >= 0, "--lookup cannot be used with --sinks");
}

}  // namespace llm
