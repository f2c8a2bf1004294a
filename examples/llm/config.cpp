#include "config.h"

#include <kernels/rope.h>
#include <kernels/router.h>
#include <algorithm>
#include <cmath>
#include <map>

#include "fields.h"

namespace llm {
namespace {

// A required number.
double stated(const Fields& fields, const char* name, double low) {
  return fields.at(name), fields.number(name, low, 1e6, 1);
}

void read_llama3(RopeConfig& rope, const Fields& fields) {
  rope.factor = stated(fields, "factor", 1);
  rope.low = stated(fields, "low_freq_factor", 1e-3);
  rope.high = stated(fields, "high_freq_factor", 1e-3);
  if (rope.high <= rope.low) fields.refuse("high_freq_factor", "not larger than low_freq_factor");
  rope.original = double(fields.integer("original_max_position_embeddings", 1, 1 << 30));
}

void read_yarn(RopeConfig& rope, const Fields& fields, const Config& config) {
  rope.factor = stated(fields, "factor", 1);
  rope.original = double(fields.integer("original_max_position_embeddings", 1, 1 << 30, config.positions));
  rope.fast = fields.number("beta_fast", 1e-3, 1e6, 32);
  rope.slow = fields.number("beta_slow", 1e-3, 1e6, 1);
  rope.truncate = fields.flag("truncate", true);
  const auto amplitude = [&](double m) { return rope.factor <= 1 ? 1.0 : 0.1 * m * std::log(rope.factor) + 1; };
  const double m = fields.number("mscale", 0, 1e3, 0), all = fields.number("mscale_all_dim", 0, 1e3, 0);
  rope.amplitude =
      float(fields.number("attention_factor", 0, 1e3, m > 0 && all > 0 ? amplitude(m) / amplitude(all) : amplitude(1)));
}

// outer: the model's fields, where Phi-3 has the number of positions before scaling.
void read_longrope(RopeConfig& rope, const Fields& fields, const Config& config, const Fields& outer) {
  rope.short_factors = fields.numbers("short_factor");
  rope.long_factors = fields.numbers("long_factor");
  const size_t pairs = size_t(config.rotary_dim / 2);
  if (rope.short_factors.size() != pairs || rope.long_factors.size() != pairs)
    fields.refuse("short_factor or long_factor", "not " + std::to_string(pairs) + " numbers");
  const int64_t inner = fields.integer("original_max_position_embeddings", 1, 1 << 30, 0);
  const int64_t otherwise = config.architecture == "phi3" ? 4096 : inner > 0 ? inner : config.positions;
  const int64_t original = outer.integer("original_max_position_embeddings", 1, 1 << 30, otherwise);
  if (inner > 0 && inner != original)
    fields.refuse("original_max_position_embeddings", concat(inner, " contradicts this model's ", original));
  rope.original = double(original);
  rope.factor = fields.number("factor", 1e-3, 1e6, double(config.positions) / rope.original);
  const double amplitude = rope.factor <= 1 ? 1 : std::sqrt(1 + std::log(rope.factor) / std::log(rope.original));
  rope.amplitude = float(fields.number("attention_factor", 0, 1e3, amplitude));
}

// json: rope_scaling of transformers 4 (with rope_type or type), or rope_parameters of transformers 5 (with
// rope_theta).
RopeConfig read_rope(const Json* json, double theta, const Config& config, const Fields& outer) {
  RopeConfig rope;
  rope.theta = theta;
  rope.positions = config.positions;
  rope.original = double(config.positions);
  if (json == nullptr) return rope;
  const Fields fields(*json, "config.json: rope");
  rope.type = fields.text("rope_type", fields.text("type", "default"));
  if (rope.type == "none") rope.type = "default";
  if (rope.type == "su" || (rope.type == "yarn" && config.architecture == "phi3")) rope.type = "longrope";
  rope.theta = fields.number("rope_theta", 1e-3, 1e12, theta);
  // Must agree with the model's own partial_rotary_factor.
  if (const double part = fields.number("partial_rotary_factor", 0, 1, -1);
      part >= 0 && int(config.head_dim * part) != config.rotary_dim)
    fields.refuse("partial_rotary_factor", "contradicts the model's partial_rotary_factor");
  if (rope.type == "linear" || rope.type == "dynamic") {
    rope.factor = stated(fields, "factor", 1);
    fields.ignore({"original_max_position_embeddings"});
  } else if (rope.type == "llama3") {
    read_llama3(rope, fields);
  } else if (rope.type == "yarn") {
    read_yarn(rope, fields, config);
  } else if (rope.type == "longrope") {
    read_longrope(rope, fields, config, outer);
  } else if (rope.type != "default") {
    fields.refuse("rope_type", shown(rope.type) + " is not supported");
  }
  // A scaling that is stated but not applied would show late, and only in long texts.
  for (const std::string& name : fields.unread()) fields.refuse(shown(name), "unknown for RoPE type " + rope.type);
  return rope;
}

enum Kind { llama, mistral, qwen2, qwen3, mixtral, qwen2_moe, qwen3_moe, phi3, gemma, gemma2, gemma3, gpt2, kinds };
enum class Slides { none, all, some };  // which layers may have a window
// An architecture, and its values of missing fields, as in the classes of transformers.
struct Family {
  const char* type;
  int64_t positions, window;
  Slides slides;
  int64_t head_dim = 0, experts = 0, experts_per_token = 0;  // head_dim: 0: hidden_size / heads
  double eps = 1e-6, theta = 1e4;
};
constexpr Family families[kinds] = {
    {"llama", 2048, 0, Slides::none},
    {"mistral", 131072, 4096, Slides::all},
    {"qwen2", 32768, 4096, Slides::some},
    {"qwen3", 32768, 4096, Slides::some, 128},
    {"mixtral", 131072, 0, Slides::all, 0, 8, 2, 1e-5, 1e6},
    {"qwen2_moe", 32768, 4096, Slides::some, 0, 60, 4},
    {"qwen3_moe", 32768, 4096, Slides::all, 0, 128, 8},
    {"phi3", 4096, 0, Slides::all, 0, 0, 0, 1e-5},
    {"gemma", 8192, 0, Slides::none, 256},
    {"gemma2", 8192, 4096, Slides::some, 256},
    {"gemma3_text", 131072, 4096, Slides::some, 256, 0, 0, 1e-6, 1e6},
    {"gpt2", 1024, 0, Slides::none, 0, 0, 0, 1e-5},
};

// Reads config.json, one subject after the other.
struct ConfigReader {
  static constexpr int64_t large = 1 << 24;
  const Json& json;
  const Fields outer{json, "config.json"};
  const std::string type = outer.text("model_type", "");
  // Gemma 3 models that read images have the text model's fields in text_config.
  const Json* const inside = type == "gemma3" ? outer.find("text_config") : nullptr;
  const Fields fields{inside != nullptr ? *inside : json, "config.json"};
  const Kind kind = kind_of(type);
  const Family family = kind == kinds ? Family{} : families[kind];
  const bool is_gpt2 = kind == gpt2, is_gemma = kind == gemma || kind == gemma2 || kind == gemma3,
             newer = kind == gemma2 || kind == gemma3;
  const bool is_moe = kind == mixtral || kind == qwen2_moe || kind == qwen3_moe,
             is_qwen = kind == qwen2 || kind == qwen3 || kind == qwen2_moe || kind == qwen3_moe;
  int64_t layers = 0;
  Config c{};

  Config all() {
    if (type.empty()) outer.refuse("model_type", "missing");
    if (kind == kinds) outer.refuse("model_type", shown(type) + " is not supported");
    for (const char* name : {"quantization_config", "quantization"}) {
      if (outer.find(name) != nullptr || fields.find(name) != nullptr)
        outer.refuse(name, "quantized checkpoints are not supported; quantize at load with --weights");
    }
    c.architecture = type;
    sizes();
    c.layers.resize(size_t(layers));
    parts();
    experts();
    windows();
    rotation();
    others();
    for (const Fields* all : {&fields, &outer}) {
      if (all == &outer && inside == nullptr) continue;
      all->refuse_unread(neutral());
      for (const std::string& name : all->unread()) c.unread.push_back(name);
    }
    return c;
  }

 private:
  static Kind kind_of(const std::string& type) {
    const auto is = [&](const Family& family) { return type == family.type; };
    return type == "gemma3" ? gemma3 : Kind(std::find_if(families, families + kinds, is) - families);
  }

  void sizes() {
    const auto size = [&](const char* name, int64_t most, int64_t otherwise) {  // otherwise: 0: required
      return otherwise > 0 ? fields.integer(name, 1, most, otherwise) : fields.integer(name, 1, most);
    };
    c.vocabulary = size("vocab_size", large, kind == gemma3 ? 262208 : 0);
    c.hidden = fields.integer(is_gpt2 ? "n_embd" : "hidden_size", 1, large);
    layers = fields.integer(is_gpt2 ? "n_layer" : "num_hidden_layers", 1, 4096);
    c.heads = size(is_gpt2 ? "n_head" : "num_attention_heads", 65536, kind == gemma3 ? 8 : 0);
    c.kv_heads = is_gpt2 ? c.heads : fields.integer("num_key_value_heads", 1, 65536, kind == gemma3 ? 4 : c.heads);
    if (c.heads % c.kv_heads != 0)
      fields.refuse("num_attention_heads", concat(c.heads, " is not a multiple of num_key_value_heads, ", c.kv_heads));
    c.head_dim = family.head_dim > 0 ? family.head_dim : c.hidden / c.heads;
    if (!is_gpt2) c.head_dim = fields.integer("head_dim", 1, 65536, c.head_dim);
    if (c.head_dim < 8 || c.head_dim % 8 != 0 || c.head_dim > 256)
      fields.refuse("head_dim", concat(c.head_dim, " is not a multiple of 8 up to 256"));
    c.positions = size(is_gpt2 ? "n_positions" : "max_position_embeddings", 1 << 30, family.positions);
    c.inner = size(is_gpt2 ? "n_inner" : "intermediate_size", large, is_gpt2 ? 4 * c.hidden : 0);
    c.eps = float(fields.number(is_gpt2 ? "layer_norm_epsilon" : "rms_norm_eps", 0, 1, family.eps));
    c.tied = fields.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", is_gemma || is_gpt2));
    activation();
    for (const Fields* from : {&fields, &outer}) {
      for (const int64_t id : from->token_ids("eos_token_id")) c.eos.push_back(id);
    }
  }

  // The first files of Gemma say gelu and mean the one with tanh.
  void activation() {
    const char* const field = is_gpt2 ? "activation_function" : newer ? "hidden_activation" : "hidden_act";
    const std::string name = fields.text(field, is_gpt2 ? "gelu_new" : is_gemma ? "gelu_pytorch_tanh" : "silu");
    const bool silu = name == "silu" || name == "swish";
    const bool tanh =
        name == "gelu_pytorch_tanh" || name == "gelu_new" || name == "gelu_fast" || (kind == gemma && name == "gelu");
    if (!(silu && !is_gpt2) && !(tanh && !is_moe)) fields.refuse(field, shown(name) + " is not supported for " + type);
    c.activation = silu ? Activation::silu : Activation::gelu_tanh;
    fields.ignore({"hidden_act", "hidden_activation"});
  }

  void parts() {
    c.layer_norm = c.learned_positions = is_gpt2;
    c.fused = kind == phi3;
    c.norm_plus_one = is_gemma;
    c.post_norms = newer;
    c.head_norms = kind == qwen3 || kind == qwen3_moe || kind == gemma3;
    const bool attention_bias = !is_gpt2 && kind != qwen2 && kind != qwen2_moe && fields.flag("attention_bias", false);
    c.qkv_bias = attention_bias || kind == qwen2 || is_gpt2 || (kind == qwen2_moe && fields.flag("qkv_bias", true));
    c.output_bias = attention_bias || is_gpt2;
    if (is_gemma) c.embedding_scale = float(std::sqrt(double(c.hidden)));
    c.score_scale = 1 / std::sqrt(float(c.head_dim));
    if (newer) {
      c.score_scale = float(1 / std::sqrt(fields.number("query_pre_attn_scalar", 1e-3, 1e6, 256)));
      const auto cap = [&](const char* name, double otherwise) {
        return float(fields.number(name, 1e-3, 1e6, kind == gemma2 && !fields.has(name) ? otherwise : 0));
      };
      if (kind == gemma2) c.score_cap = cap("attn_logit_softcapping", 50);
      c.logit_cap = cap("final_logit_softcapping", 30);
    }
    if (is_gpt2) {
      fields.must_be("scale_attn_weights", true);
      fields.must_be("scale_attn_by_inverse_layer_idx", false);
      fields.must_be("add_cross_attention", false);
      fields.ignore({"n_ctx", "reorder_and_upcast_attn"});
    }
  }

  void experts() {
    if (!is_moe) return;
    c.experts = fields.integer("num_experts", 1, kernels::kMaxExperts, family.experts);
    c.experts =
        fields.integer("num_local_experts", 1, kernels::kMaxExperts, c.experts);  // transformers 5 writes either
    c.experts_per_token = fields.integer("num_experts_per_tok", 1, kernels::kMaxTopK, family.experts_per_token);
    if (c.experts_per_token > c.experts)
      fields.refuse("num_experts_per_tok",
                    concat(c.experts_per_token, " is larger than the number of experts, ", c.experts));
    c.expert_inner = kind == mixtral ? c.inner : fields.integer("moe_intermediate_size", 1, large);
    c.shared_inner = kind == qwen2_moe ? fields.integer("shared_expert_intermediate_size", 1, large) : 0;
    c.shares_add_to_one = kind == mixtral || fields.flag("norm_topk_prob", false);
    const int64_t step = kind == mixtral ? 1 : fields.integer("decoder_sparse_step", 1, 4096, 1);
    std::vector<int64_t> dense;
    if (kind != mixtral) dense = fields.integers("mlp_only_layers", 0, layers - 1);
    for (int64_t i = 0; i < layers; ++i)
      c.layers[size_t(i)].experts = std::count(dense.begin(), dense.end(), i) == 0 && (i + 1) % step == 0;
  }

  // sliding_window: null means no window. If all layers of an architecture are alike, layer_types must agree.
  void windows() {
    const Slides which = family.slides;
    const Json* const types = fields.find("layer_types");
    if (types != nullptr && (!types->is_array() || int64_t(types->size()) != layers))
      fields.refuse("layer_types", "not an array of one type per layer");
    int64_t window = 0, first = 0, period = 0;
    if (which != Slides::none) {
      window = fields.integer("sliding_window", 0, 1 << 30, fields.has("sliding_window") ? 0 : family.window);
      if (is_qwen && !fields.flag("use_sliding_window", false)) window = 0;
      if (kind == qwen2 || kind == qwen3) first = fields.integer("max_window_layers", 0, 4096, 28);
      if (kind == gemma2) period = 2;
      if (kind == gemma3)
        period =
            fields.integer("sliding_window_pattern", 1, 4096, fields.integer("_sliding_window_pattern", 1, 4096, 6));
      fields.ignore({"max_window_layers", "sliding_window_pattern", "_sliding_window_pattern"});
    }
    if (kind == qwen2_moe && window > 0 && types == nullptr)
      fields.refuse("layer_types", "missing, but required with use_sliding_window");
    for (int64_t i = 0; i < layers; ++i) {
      bool slides = period > 0 ? (i + 1) % period != 0 : i >= first;
      if (types != nullptr) {
        const Json& name = (*types)[size_t(i)];
        if (name != "sliding_attention" && name != "full_attention")
          fields.refuse("layer_types", shown(name.dump()) + " is not supported");
        slides = name == "sliding_attention";
        if (which != Slides::some && slides != (window > 0))
          fields.refuse("layer_types", concat("layer ", i, " has ", name.get<std::string>(), ", but ", type, " uses ",
                                              window > 0 ? "sliding" : "full", "_attention in all layers"));
      }
      c.layers[size_t(i)].window = slides ? window : 0;
      c.layers[size_t(i)].rope = kind == gemma3 && slides ? 1 : 0;
    }
  }

  void rotation() {
    double partial = is_gpt2 ? 0 : fields.number("partial_rotary_factor", 0, 1, 1);
    const Json* const parameters = fields.find("rope_parameters");
    const std::string what = "config.json: rope_parameters";
    if (parameters != nullptr) partial = Fields(*parameters, what).number("partial_rotary_factor", 0, 1, partial);
    c.rotary_dim = int(double(c.head_dim) * partial);
    if (c.rotary_dim % 2 != 0) fields.refuse("partial_rotary_factor", "rotates an odd number of columns");
    const double theta = is_gpt2 ? family.theta : fields.number("rope_theta", 1e-3, 1e12, family.theta);
    if (kind == gemma3) {
      const double local = fields.number("rope_local_base_freq", 1e-3, 1e12, 1e4);
      const Json *full = nullptr, *sliding = nullptr;
      if (parameters != nullptr) {
        const Fields both(*parameters, what);
        full = &both.at("full_attention"), sliding = &both.at("sliding_attention");
      }
      c.ropes = {scaled_rope(full, theta), read_rope(sliding, local, c, fields)};
    } else {
      c.ropes = {scaled_rope(parameters, theta)};
    }
    // Phi-3 says here from which length on the long factors apply; other models say it in the scaling.
    const int64_t original = fields.integer("original_max_position_embeddings", 1, 1 << 30, 0);
    const auto known = [&](const RopeConfig& rope) { return double(original) == rope.original; };
    if (original > 0 && kind != phi3 && !std::all_of(c.ropes.begin(), c.ropes.end(), known))
      fields.refuse("original_max_position_embeddings", concat(original, " contradicts rope_scaling"));
  }

  // As in transformers, a rope_scaling that is not empty goes before rope_parameters, and takes their theta unless it
  // has its own.
  RopeConfig scaled_rope(const Json* parameters, double theta) const {
    const RopeConfig rope = read_rope(parameters, theta, c, fields);
    const Json* const scaling = fields.find("rope_scaling");
    if (scaling == nullptr || scaling->empty()) return rope;
    const RopeConfig scaled = read_rope(scaling, rope.theta, c, fields);
    const auto same = [&](int64_t length) {
      return rope.frequencies(c.rotary_dim, length) == scaled.frequencies(c.rotary_dim, length);
    };
    if (rope.type != "default" && !(same(1) && same(large) && rope.amplitude == scaled.amplitude))
      fields.refuse("rope_scaling", "contradicts rope_parameters of type " + rope.type);
    return scaled;
  }

  // Fields that do not change the computation.
  void others() {
    for (const Fields* all : {&fields, &outer})
      all->ignore(
          {"architectures", "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range",
           "pad_token_id", "eos_token_id", "attention_dropout", "_name_or_path", "model_type", "pretraining_tp",
           "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "embd_dropout", "cache_implementation",
           "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
           "task_specific_params", "bos_token_id", "output_router_logits", "router_aux_loss_coef",
           "router_jitter_noise", "auto_map", "output_attentions", "output_hidden_states", "return_dict",
           "rope_interleaved", "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type",
           "tie_word_embeddings", "text_config", "vision_config", "head_dim", "is_decoder",
           "cross_attention_hidden_size", "classifier_dropout"});
    outer.ignore({"mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"});
    fields.must_be("rope_interleaved", false);
  }

  // Fields that change the computation of some architecture, each with the value that changes nothing in this one.
  std::map<std::string, Json> neutral() const {
    return {{"alibi", false},
            {"attention_multiplier", nullptr},
            {"attn_logit_softcapping", nullptr},
            {"embedding_multiplier", 1},
            {"final_logit_softcapping", nullptr},
            {"is_causal", true},
            {"logits_scaling", 1},
            {"mlp_bias", false},
            {"position_embedding_type", is_gpt2 ? "absolute" : "rope"},
            {"residual_multiplier", 1},
            {"use_bidirectional_attention", false},
            {"use_mrope", false},
            {"use_qk_norm", c.head_norms},
            {"use_rope", !is_gpt2}};
  }
};

}  // namespace

Config read_config(const Json& json) { return ConfigReader{json}.all(); }

std::vector<float> RopeConfig::frequencies(int rotary_dim, int64_t length) const {
  namespace k = kernels;
  std::vector<float> f(size_t(rotary_dim / 2));
  if (type == "linear") {
    k::rope_frequencies_linear(f.data(), rotary_dim, theta, factor);
  } else if (type == "dynamic") {
    const double l = double(std::max(length, positions)), base = factor * l / double(positions) - (factor - 1);
    k::rope_frequencies_ntk(f.data(), rotary_dim, theta, base);
  } else if (type == "llama3") {
    k::rope_frequencies_llama3(f.data(), rotary_dim, theta, factor, low, high, original);
  } else if (type == "yarn") {
    k::rope_frequencies_yarn(f.data(), rotary_dim, theta, factor, original, fast, slow, truncate);
  } else {
    k::rope_frequencies(f.data(), rotary_dim, theta);
    if (type == "longrope") {
      const std::vector<double>& by = double(length) > original ? long_factors : short_factors;
      for (size_t i = 0; i < f.size(); ++i) f[i] = float(std::pow(theta, -2.0 * double(i) / rotary_dim) / by[i]);
    }
  }
  return f;
}

bool RopeConfig::differs(int64_t from, int64_t to) const {
  return type == "longrope" && (double(from) > original) != (double(to) > original);
}

}  // namespace llm
