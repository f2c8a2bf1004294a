// Texts longer than the cache: the first keys stay, and the others go around. Against the whole computation in double
// over the keys that ought to be there.
#include <cmath>
#include <map>

#include "golden.h"
#include "support/catch.h"

using namespace golden;
using Row = std::vector<double>;

namespace {

// A Llama that reads one token after the other and keeps all keys and values, of which each token sees the first ones
// and the last ones, but none in front of its window.
class Reference {
 public:
  explicit Reference(const Json& golden) : config_(golden["config"]) {
    for (Tensor& t : tensors_of(golden)) tensors_[t.name] = t;
    keys_.resize(config_["num_hidden_layers"].get<size_t>()), values_.resize(keys_.size());
  }
  Row logits(int32_t id, int64_t at, int64_t context, int64_t sinks) {
    const int64_t window = config_.contains("sliding_window") && !config_["sliding_window"].is_null()
                               ? config_["sliding_window"].get<int64_t>()
                               : at + 1;
    const size_t hidden = config_["hidden_size"], dim = config_["head_dim"], heads = config_["num_attention_heads"],
                 kv_heads = config_["num_key_value_heads"];
    const std::vector<float>& table = tensors_["model.embed_tokens.weight"].values;
    Row x(table.begin() + id * int64_t(hidden), table.begin() + (id + 1) * int64_t(hidden));
    for (size_t l = 0; l < keys_.size(); ++l) {
      const std::string name = "model.layers." + std::to_string(l) + ".", attention = name + "self_attn.";
      Row y = norm(x, name + "input_layernorm.weight"), q = product(y, attention + "q_proj.weight"),
          k = product(y, attention + "k_proj.weight");
      rotate(q, dim, at), rotate(k, dim, at);
      keys_[l].push_back(k), values_[l].push_back(product(y, attention + "v_proj.weight"));
      Row o(heads * dim, 0);
      for (size_t h = 0; h < heads; ++h) {
        const size_t from = h / (heads / kv_heads) * dim;
        double sum = 0;
        for (int64_t j = 0; j <= at; ++j) {
          if ((j >= sinks && at - j >= context - sinks) || at - j >= window) continue;
          double score = 0;
          for (size_t c = 0; c < dim; ++c) score += q[h * dim + c] * keys_[l][size_t(j)][from + c];
          const double weight = std::exp(score / std::sqrt(double(dim)));
          sum += weight;
          for (size_t c = 0; c < dim; ++c) o[h * dim + c] += weight * values_[l][size_t(j)][from + c];
        }
        for (size_t c = 0; c < dim; ++c) o[h * dim + c] /= sum;
      }
      add(x, product(o, attention + "o_proj.weight"));
      y = norm(x, name + "post_attention_layernorm.weight");
      Row gate = product(y, name + "mlp.gate_proj.weight");
      const Row up = product(y, name + "mlp.up_proj.weight");
      for (size_t i = 0; i < up.size(); ++i) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
      add(x, product(gate, name + "mlp.down_proj.weight"));
    }
    return product(norm(x, "model.norm.weight"), "lm_head.weight");
  }

 private:
  static void add(Row& x, const Row& y) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }
  Row norm(const Row& x, const std::string& name) {
    double sum = 0;
    for (const double v : x) sum += v * v;
    Row out(x);
    for (size_t i = 0; i < x.size(); ++i)
      out[i] *= tensors_.at(name).values[i] / std::sqrt(sum / double(x.size()) + config_["rms_norm_eps"].get<double>());
    return out;
  }
  Row product(const Row& x, const std::string& name) {
    const std::vector<float>& w = tensors_.at(name).values;
    Row out(w.size() / x.size(), 0);
    for (size_t i = 0; i < w.size(); ++i) out[i / x.size()] += x[i % x.size()] * w[i];
    return out;
  }
  void rotate(Row& x, size_t dim, int64_t at) const {
    const double theta = config_["rope_parameters"]["rope_theta"];
    for (size_t i = 0; i < x.size(); ++i) {
      if (i % dim >= dim / 2) continue;
      const double angle = double(at) * std::pow(theta, -2 * double(i % dim) / double(dim)), a = x[i],
                   b = x[i + dim / 2];
      x[i] = a * std::cos(angle) - b * std::sin(angle), x[i + dim / 2] = b * std::cos(angle) + a * std::sin(angle);
    }
  }

  Json config_;
  std::map<std::string, Tensor> tensors_;
  std::vector<std::vector<Row>> keys_, values_;
};

llm::Settings settings_of(const std::string& directory) {
  llm::Settings s;
  s.directory = directory, s.device = "cpu", s.threads = 1, s.quiet = true, s.cache = "fp32", s.temperature = 0,
  s.ignore_eos = true, s.most = 90;
  return s;
}

}  // namespace

TEST_CASE("a text goes on behind the context as with all keys and a mask") {
  for (const char* name : {"llama", "mistral"}) {
    const Json golden = read(name);
    const ModelFolder folder(golden);
    const auto ids = golden["ids"].get<std::vector<int32_t>>();
    for (const int64_t sinks : {0, 4}) {
      for (const int64_t page : {0, 7}) {
        INFO(name << ", " << sinks << " sinks, pages of " << page);
        llm::Settings s = settings_of(folder.path());
        s.context = 45, s.sinks = sinks, s.page = page;
        llm::Session session(s);
        session.load(1);
        llm::Session::Times times;
        // The logits behind each token, since a text that is greedy might be the same with wrong ones.
        const auto text = session.generate({ids}, {}, times)[0];
        CHECK(std::string(text.finish) == "length");
        REQUIRE(text.ids.size() == ids.size() + 90);
        Reference reference(golden);
        for (size_t i = 0; i + 1 < text.ids.size(); ++i) {
          const Row logits = reference.logits(text.ids[i], int64_t(i), s.context, sinks);
          if (i + 1 < ids.size()) continue;
          INFO("behind token " << i);
          CHECK(text.ids[i + 1] == std::max_element(logits.begin(), logits.end()) - logits.begin());
          if (i + 2 == text.ids.size())
            CHECK(difference(session.model->logits(0), std::vector<float>(logits.begin(), logits.end())) < 2e-5);
        }
      }
    }
  }
}

TEST_CASE("a prompt may be longer than a ring") {
  for (const char* name : {"llama", "mistral"}) {
    const Json golden = read(name);
    const ModelFolder folder(golden);
    const auto ids = golden["ids"].get<std::vector<int32_t>>();
    for (const int64_t context : {8, 23, 39}) {
      INFO(name << ", a context of " << context << " of " << ids.size());
      llm::Settings s = settings_of(folder.path());
      s.context = context, s.sinks = 4, s.chunk = 5, s.most = 30, s.repetition_penalty = 1.0;
      llm::Session session(s);
      session.load(1);
      llm::Session::Times times;
      const auto text = session.generate({ids}, {}, times)[0];
      REQUIRE(text.ids.size() == ids.size() + 30);
      Reference reference(golden);
      for (size_t i = 0; i + 1 < text.ids.size(); ++i) {
        const Row logits = reference.logits(text.ids[i], int64_t(i), context, 4);
        if (i + 1 < ids.size()) continue;
        INFO("behind token " << i);
        CHECK(text.ids[i + 1] == std::max_element(logits.begin(), logits.end()) - logits.begin());
        if (i + 2 == text.ids.size())
          CHECK(difference(session.model->logits(0), std::vector<float>(logits.begin(), logits.end())) < 2e-5);
      }
      // Penalties count what the ring has: as in the text that has been written up to there.
      s.repetition_penalty = 1.3;
      llm::Session whole(s), again(s);
      whole.load(1), again.load(1);
      const auto all = whole.generate({ids}, {}, times)[0].ids;
      s.most = 12;
      const auto rest = again.generate({{all.begin(), all.begin() + int64_t(ids.size()) + 18}}, {}, times)[0].ids;
      CHECK(rest == all);
    }
  }
}

TEST_CASE("texts of a batch go on by themselves") {
  const Json golden = read("llama");
  const ModelFolder folder(golden);
  const auto ids = golden["ids"].get<std::vector<int32_t>>();
  llm::Settings s = settings_of(folder.path());
  s.context = 45, s.sinks = 4, s.repetition_penalty = 1.2;
  const std::vector<llm::Tokenizer::Ids> prompts{{ids.begin(), ids.begin() + 40}, {ids.begin(), ids.begin() + 3}};
  llm::Session both(s);
  both.load(2);
  llm::Session::Times times;
  const auto texts = both.generate(prompts, {}, times);
  for (size_t i = 0; i < 2; ++i) {
    llm::Session one(s);
    one.load(1);
    CHECK(one.generate({prompts[i]}, {}, times)[0].ids == texts[i].ids);
  }
}

TEST_CASE("a ring that is not full changes nothing, whatever layers see") {
  const Json golden = read("gemma2");
  const ModelFolder folder(golden);
  const auto ids = golden["ids"].get<std::vector<int32_t>>();
  std::vector<std::vector<float>> logits;
  for (const int64_t sinks : {-1, 4}) {
    llm::Settings s = settings_of(folder.path());
    s.context = 150, s.sinks = sinks;
    llm::Session session(s);
    session.load(1);
    llm::Session::Times times;
    session.generate({ids}, {}, times);
    const float* const last = session.model->logits(0);
    logits.emplace_back(last, last + session.config.vocabulary);
  }
  CHECK(difference(logits[0].data(), logits[1]) < 1e-6);
}

TEST_CASE("guesses would take the place of keys that are still seen") {
  const Json golden = read("llama");
  const ModelFolder folder(golden);
  llm::Settings s = settings_of(folder.path());
  s.context = 45, s.sinks = 4, s.lookup = 3;
  llm::Session session(s);
  CHECK_THROWS_AS(session.load(1), llm::Error);
}

TEST_CASE("models whose positions end, or whose keys would be wrong, are refused") {
  for (const char* name : {"gpt2", "llama_dynamic", "phi3_long"}) {
    INFO(name);
    const Json golden = read(name);
    const ModelFolder folder(golden);
    llm::Settings s = settings_of(folder.path());
    s.context = 45, s.sinks = 4;
    llm::Session session(s);
    CHECK_THROWS_AS(session.load(1), llm::Error);
  }
}
