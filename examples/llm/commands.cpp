#include "commands.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>

namespace llm {
namespace {

void say_speed(const Session& session, const Session::Times& t) {
  std::string rates = t.speed();
  if (session.settings.lookup > 0 && t.steps > 0)
    rates += ", " + fixed(double(t.decoded - t.firsts) / double(t.steps), 2) + " tokens/step";
  if (t.steps > 0) {
    const double bytes = double(t.steps) * double(session.model->weight_bytes());
    rates += ", weights read at " + fixed(bytes / t.decode_seconds / 1e9, 1) + " GB/s";
  }
  session.settings.say("\nprompt: ", t.prompt_tokens, " tokens, ",
                       fixed(t.prompt_seconds > 0 ? double(t.prompt_tokens) / t.prompt_seconds : 0, 0),
                       " tokens/s; output: ", t.decoded, " tokens", rates, "; ", session.device->name(), "; seed ",
                       session.seed);
}

// Prints a line to stdout.
template <class... Parts>
void print(const Parts&... parts) {
  put(stdout, concat(parts...) + "\n");
}

}  // namespace

int generate(const Settings& settings, const Prompts& given) {
  const std::vector<std::string>& prompts = given.texts;
  Session session(settings);
  session.load(int64_t(prompts.size()));
  std::vector<Tokenizer::Ids> ids;
  for (const std::string& prompt : prompts) ids.push_back(session.tokenizer->encode(prompt));
  // A prompt that begins with BOS itself does not get a second one.
  const Tokenizer::Ids& begin = session.tokenizer->before();
  for (Tokenizer::Ids& text : ids) {
    if (begin.size() == 1 && text.size() > 1 && text[0] == begin[0] && text[1] == begin[0]) text.erase(text.begin());
  }
  session.check(ids, given.lines);
  catch_interrupts();
  Session::Times times;
  const bool stream = !settings.json && prompts.size() == 1;
  const auto echo = [&](size_t i) { return settings.echo ? valid_utf8(prompts[i]) : std::string(); };
  // If the line may be needed to show progress, the prompt is printed with the first text after it.
  std::string prompt = stream ? echo(0) : "";
  if (!ProgressLine::can_show(settings)) {
    put(stdout, prompt);
    prompt.clear();
  }
  const auto texts = session.generate(
      ids,
      [&](size_t, const std::string& more) {
        if (!stream) return;
        put(stdout, prompt + more);
        prompt.clear();
      },
      times);
  if (settings.json) {
    Json out = Json::array();
    for (size_t i = 0; i < texts.size(); ++i) {
      const auto& all = texts[i].ids;
      out.push_back({{"prompt", valid_utf8(prompts[i])},
                     {"text", texts[i].written},
                     {"seed", session.seed + i},
                     {"prompt_ids", Tokenizer::Ids(all.begin(), all.begin() + texts[i].prompt)},
                     {"ids", Tokenizer::Ids(all.begin() + texts[i].prompt, all.end())},
                     {"prompt_tokens", texts[i].prompt},
                     {"finish_reason", texts[i].finish}});
    }
    Json all = {{"texts", out},
                {"seed", session.seed},
                {"prompt_tokens", times.prompt_tokens},
                {"prompt_seconds", times.prompt_seconds},
                {"decoded_tokens", times.decoded},
                {"decode_seconds", times.decode_seconds},
                {"steps", times.steps}};
    all.update(session.about());
    print(all);
  } else if (!stream) {
    for (size_t i = 0; i < texts.size(); ++i) print(i > 0 ? "\n" : "", echo(i), texts[i].written);
  } else {
    print(prompt);
  }
  say_speed(session, times);
  return 0;
}

namespace {

// How the fields of the file were understood: rotation, windows and experts.
std::string described(const RopeConfig& rope) {
  std::string out = concat(rope.type, ", theta ", rope.theta);
  if (rope.type != "default") out += concat(", factor ", rope.factor);
  if (rope.type != "default" && rope.type != "linear") out += concat(", original context ", int64_t(rope.original));
  return out;
}

std::string described(const Config& c, int64_t sliding, int64_t window, int64_t sparse) {
  const auto in = [&](int64_t n) { return concat(" in ", n, " of ", c.layers.size(), " layers"); };
  std::string out = sliding == 0 ? "full attention" : concat("sliding window of ", window, " tokens", in(sliding));
  if (sparse > 0) out += concat(", ", c.experts, " experts (", c.experts_per_token, " per token)", in(sparse));
  return out + ", output head " + (c.tied ? "tied to the embedding" : "not tied");
}

}  // namespace

int info(const Settings& settings, int64_t texts) {
  Session session(settings);
  const Config& c = session.config;
  const Plan plan = Model::plan(c, *session.weights, *session.device, session.options(texts));
  session.say_changes(plan);
  std::vector<std::string> ends;
  for (const int32_t id : session.stops) ends.push_back(concat(id, " ", shown(session.tokenizer->bytes(id, true))));
  const auto mb = [](size_t bytes) { return fixed(double(bytes) / 1e6, 1); };
  int64_t sliding = 0, window = 0, sparse = 0;
  for (const LayerConfig& layer : c.layers)
    sliding += layer.window > 0, window = std::max(window, layer.window), sparse += layer.experts;
  if (settings.json) {
    Json ropes = Json::array();
    for (const RopeConfig& rope : c.ropes) {
      if (!c.learned_positions)
        ropes.push_back(
            {{"type", rope.type}, {"theta", rope.theta}, {"factor", rope.factor}, {"original", rope.original}});
    }
    const Json out = {{"architecture", c.architecture},
                      {"layers", c.layers.size()},
                      {"hidden", c.hidden},
                      {"heads", c.heads},
                      {"kv_heads", c.kv_heads},
                      {"head_dim", c.head_dim},
                      {"inner", c.inner},
                      {"vocabulary", c.vocabulary},
                      {"positions", c.positions},
                      {"ropes", ropes},
                      {"window", window},
                      {"layers_with_window", sliding},
                      {"experts", c.experts},
                      {"experts_per_token", c.experts_per_token},
                      {"layers_with_experts", sparse},
                      {"tied", c.tied},
                      {"context", plan.context},
                      {"texts", texts},
                      {"stop_tokens", session.stops},
                      {"chat", session.format.has_value()},
                      {"device", session.device->name()},
                      {"bytes",
                       {{"mapped", plan.mapped},
                        {"weights", plan.weights},
                        {"cache", plan.cache},
                        {"activations", plan.activations},
                        {"free", session.device->free_bytes()}}}};
    print(out);
    return 0;
  }
  print(c.architecture, ": ", c.layers.size(), " layers, hidden size ", c.hidden, ", ", c.heads, " query and ",
        c.kv_heads, " KV heads of size ", c.head_dim, ", feed-forward size ", c.inner, ", vocabulary ", c.vocabulary,
        " (tokenizer ", session.tokenizer->size(), ")");
  const std::string windows = c.ropes.size() > 1 ? "; sliding window: " + described(c.ropes[1]) : "";
  print("positions  ", c.positions, ", ", c.learned_positions ? "learned" : "RoPE " + described(c.ropes[0]) + windows);
  print("EOS        ", ends.empty() ? "none" : listed(ends));
  print("layers     ", described(c, sliding, window, sparse));
  print("chat       ", session.format ? "the model's template" : shown(session.why_no_format, 300));
  print("device     ", session.device->name());
  print("memory     ", mb(plan.weights + plan.mapped), " MB weights", plan.mapped > 0 ? " (memory-mapped), " : ", ",
        mb(plan.cache), " MB KV cache (", texts > 1 ? concat(texts, " x ") : "", plan.context, " tokens), ",
        mb(plan.activations), " MB activations; ", mb(session.device->free_bytes()), " MB free");
  return 0;
}

// In windows of the context, each `stride` tokens after the one before. A window scores only tokens that the one before
// has not scored. halves: as in llama.cpp, windows score their second half, and a window that is not whole does not
// count.
int perplexity(const Settings& settings, const std::string& file, const std::string& text, int64_t stride,
               bool halves) {
  Session session(settings);
  session.load(1);
  // What looks like a special token in the file is plain text, as for llama.cpp.
  const Tokenizer::Ids ids = session.tokenizer->encode(valid_utf8(text), true, false);
  const Tokenizer::Ids& begin_ids = session.tokenizer->before();
  const int64_t n = int64_t(ids.size()), context = session.model->context();
  if (context < (halves ? 3 : 2))
    throw Error("--context: ", context, " tokens, but perplexity needs at least ", halves ? 3 : 2);
  if (n < 2) throw Error(file, ": too short: ", n, " tokens");
  if (stride == 0) stride = std::max<int64_t>(1, context / 2);
  if (stride > context) throw Error("--stride: ", stride, " is larger than the context, ", context, " tokens");
  if (halves) stride = context;
  if (halves && n < context)
    throw Error(file, ": ", n, " tokens, but --halves needs at least one context of ", context);
  catch_interrupts();
  double sum = 0;
  int64_t scored = 0, bytes = 0;
  const double began = seconds_now();
  for (int64_t begin = 0, end = 1; (halves ? begin + context <= n : end < n) && !interrupted(); begin += stride) {
    const int64_t first = halves ? begin + context / 2 + 1 : end;  // the first token that is scored
    end = std::min(n, begin + context);
    Tokenizer::Ids some(ids.begin() + begin, ids.begin() + end);
    if (halves && begin_ids.size() == 1) some[0] = begin_ids[0];
    session.model->read(0, 0, some.data(), int64_t(some.size()), {}, [&](int64_t i, const float* logits) {
      const int64_t next = begin + i + 1;
      if (next < first || next >= end) return;
      sum += negative_log_likelihood(logits, session.config.vocabulary, ids[size_t(next)]);
      bytes += int64_t(session.tokenizer->bytes(ids[size_t(next)], true).size());
      scored += 1;
    });
    if (!std::isfinite(sum)) throw Error("the logits are not finite: the model has overflowed");
    if (ProgressLine::can_show(settings))
      std::fputs(concat("\r", end, " of ", n, " tokens, perplexity ", fixed(std::exp(sum / double(scored)), 4)).c_str(),
                 stderr);
  }
  if (ProgressLine::can_show(settings)) std::fprintf(stderr, "\r");
  if (scored == 0) throw Error("interrupted before the first token was scored");
  const double nats = sum / double(scored), bits = sum / std::log(2.0) / double(bytes), seconds = seconds_now() - began;
  const bool bos = begin_ids.size() == 1;
  if (settings.json) {
    Json out = {{"perplexity", std::exp(nats)},
                {"nats_per_token", nats},
                {"bits_per_byte", bits},
                {"scored_tokens", scored},
                {"bytes", bytes},
                {"stride", stride},
                {"halves", halves},
                {"begins_with_bos", bos},
                {"interrupted", interrupted()},
                {"seconds", seconds}};
    out.update(session.about());
    print(out);
  } else {
    print("perplexity ", fixed(std::exp(nats), 4), " (", fixed(nats, 5), " nats/token, ", fixed(bits, 5),
          " bits/byte); scored ", scored, " tokens (", bytes, " bytes)",
          interrupted() ? " before Ctrl-C"
          : halves      ? " in second halves"
                        : "",
          ", context ", context, ", stride ", stride, ", ",
          !bos     ? "no BOS"
          : halves ? "BOS in each window"
                   : "BOS at the beginning",
          "; ", fixed(seconds, 1), " s");
  }
  return interrupted() ? 130 : 0;
}

namespace {

// The bandwidth of memory in GB/s: the best of six reads of 256 MB, or on a GPU of 2 GB.
double read_bandwidth(Device& device) {
  const size_t bytes = device.is_host() ? size_t(256) << 20 : size_t(2) << 30;
  const Buffer<char> from(device, int64_t(bytes), "a measurement");
  const Buffer<uint32_t> out(device, 1, "a measurement");
  if (device.is_host()) std::memset(from, 1, bytes);  // pages that were never written all map to the same zero page
  double best = 0;
  for (int i = 0; i < 6; ++i) {
    device.synchronize();
    const double begin = seconds_now();
    if (const char* why = device.rows().read_all(device.place(), from, bytes, out)) throw Error(why);
    device.synchronize();
    best = std::max(best, double(bytes) / (seconds_now() - begin) / 1e9);
  }
  return best;
}

// Measures a model with random tokens.
class Bench {
 public:
  Bench(Session& session, int64_t texts) : session_(session), texts_(texts) {}

  Json what() const {
    return {{"device", device_.name()},
            {"weights", name_of(model_.weights_type())},
            {"inputs", name_of(model_.inputs_type())},
            {"cache", name_of(model_.cache_type())},
            {"texts", texts_},
            {"draws", how_.temperature > 0},
            {"read_gb_per_s", bandwidth_},
            {"weight_bytes", model_.weight_bytes()}};
  }

  // A prompt: the median of three, after one that warms up.
  Json prompt(int64_t tokens) {
    const auto ids = random_ids(tokens);
    std::vector<double> seconds;
    for (int i = 0; i < 4; ++i) {
      const double begin = seconds_now();
      model_.read(0, 0, ids.data(), tokens);
      device_.synchronize();
      if (i > 0) seconds.push_back(seconds_now() - begin);
    }
    const double each = median(seconds), flops = 2 * model_.multiplications(tokens) / each;
    return {{"tokens", tokens}, {"tokens_per_s", double(tokens) / each}, {"tflops", flops / 1e12}};
  }

  // So many steps after a context.
  Json decode(int64_t context, int64_t steps) {
    const int64_t known = std::max<int64_t>(1, context);
    const double each = step_seconds(read_contexts(known), steps);
    const double bytes = double(model_.weight_bytes()) +
                         double(model_.key_bytes()) * double(texts_) * double(known + steps / 2),
                 rate = bytes / each / 1e9;
    return {{"context", context},
            {"tokens_per_s", double(texts_) / each},
            {"microseconds", each * 1e6},
            {"gb_per_s", rate},
            {"share_of_reading", rate / bandwidth_}};
  }

 private:
  static double median(std::vector<double> seconds) {
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() / 2];
  }

  std::vector<int32_t> random_ids(int64_t n) const {
    std::vector<int32_t> ids(static_cast<size_t>(n));
    uint64_t state = 1;
    for (int32_t& id : ids)
      id = int32_t((state = state * 6364136223846793005ull + 1442695040888963407ull) >> 33) % int32_t(count_);
    return ids;
  }

  // Reads a context for each text. Returns how long each text is then, including the first token after the context.
  int64_t read_contexts(int64_t tokens) {
    const auto ids = random_ids(tokens);
    for (int64_t i = 0; i < texts_; ++i) {
      model_.begin(i, ids, how_, count_, uint64_t(i));
      model_.read(i, 0, ids.data(), tokens);
      model_.choose_next(i);
      model_.token(i, tokens);  // throws if the logits are not finite
    }
    return tokens + 1;
  }

  // The median of several parts, so that a disturbance does not count.
  double step_seconds(int64_t length, int64_t steps) {
    for (int i = 0; i < 8; ++i) model_.step(length++);
    std::vector<double> seconds;
    const int64_t part = std::max<int64_t>(1, steps / 8);
    for (int64_t done = 0; done + part <= steps; done += part) {
      device_.synchronize();
      const double begin = seconds_now();
      for (int64_t i = 0; i < part; ++i) model_.step(length++);
      device_.synchronize();
      seconds.push_back((seconds_now() - begin) / double(part));
    }
    return median(seconds);
  }

  Session& session_;
  int64_t texts_;
  Model& model_ = *session_.model;
  Device& device_ = *session_.device;
  const int64_t count_ = session_.tokens();
  const Choice how_ = session_.settings.chooses() ? session_.choice : Choice{};  // by default the most likely token
  const double bandwidth_ = read_bandwidth(device_);
};

// The tokens/s of a run with --json, for the prompt of this many tokens and for each context. Throws if the run lacks
// one, or if it does not have the same device, size of weights, types and number of texts as `now`.
std::map<std::string, double> speeds_of(const Json& run, const Json& now, int64_t prompt,
                                        const std::vector<int64_t>& contexts) {
  const auto member = [](const Json& of, const char* name) {
    return of.is_object() && of.contains(name) ? of[name] : Json();
  };
  for (const char* name : {"device", "weights", "inputs", "cache", "texts", "weight_bytes"}) {
    if (member(run, name) != now[name])
      throw Error("--compare: ", name, " differs: ", member(run, name).dump(), " in the file, ", now[name].dump(),
                  " now");
  }
  if ((member(run, "draws") == true) != (now["draws"] == true))
    throw Error("--compare: one run samples, the other is greedy");
  std::map<std::string, double> out;
  const auto add = [&](const std::string& name, const Json& of) {
    const Json speed = member(of, "tokens_per_s");
    if (!speed.is_number() || !(speed.get<double>() > 0)) throw Error("--compare: the file has no result for ", name);
    out[name] = speed.get<double>();
  };
  const Json first = member(run, "prompt"), decode = member(run, "decode");
  if (prompt > 0)
    add("prompt of " + std::to_string(prompt) + " tokens", member(first, "tokens") == prompt ? first : Json());
  for (const int64_t context : contexts) {
    const auto at =
        std::find_if(decode.begin(), decode.end(), [&](const Json& it) { return member(it, "context") == context; });
    add("decode at context " + std::to_string(context), at != decode.end() ? *at : Json());
  }
  return out;
}

}  // namespace

// For each context: reads as many random tokens, then times steps. Returns 1 if anything is slower than before by more
// than 5 %.
int bench(const Settings& given, const std::vector<int64_t>& contexts, int64_t prompt, int64_t steps, int64_t texts,
          const std::optional<Json>& before) {
  Settings settings = given;
  const int64_t most = *std::max_element(contexts.begin(), contexts.end()),
                needed = std::max(prompt, most + 1) + steps + 16;
  if (settings.context == 0) settings.context = needed;
  if (settings.context < needed) throw Error("--context: this benchmark needs at least ", needed, " tokens");
  Session session(settings);
  if (texts > 1 && session.config.lengths_matter())
    throw Error("--texts: no batches of this model, whose RoPE depends on the sequence length");
  session.load(texts);
  Bench measure(session, texts);
  Json out = measure.what();
  std::map<std::string, double> old;
  if (before) old = speeds_of(*before, out, prompt, contexts);
  const auto say = [&](const auto&... parts) {
    if (!settings.json) print(parts...);
  };
  const auto number = [](const Json& of, const char* name, int digits) {
    return fixed(of[name].get<double>(), digits);
  };
  say(session.device->name(), "; memory bandwidth ", number(out, "read_gb_per_s", 1), " GB/s");
  if (prompt > 0) {
    const Json& it = out["prompt"] = measure.prompt(prompt);
    say("prompt of ", prompt, " tokens: ", number(it, "tokens_per_s", 1), " tokens/s, ", number(it, "tflops", 2),
        " TFLOP/s");
  }
  out["decode"] = Json::array();
  for (const int64_t context : contexts) {
    out["decode"].push_back(measure.decode(context, steps));
    const Json& it = out["decode"].back();
    const double share = it["share_of_reading"].get<double>();
    say("decode at context ", context, ": ", number(it, "tokens_per_s", 1), " tokens/s, ",
        number(it, "microseconds", 1), " us/step, ", number(it, "gb_per_s", 1), " GB/s, ", fixed(100 * share, 1),
        " % of memory bandwidth", share > 1 ? " (weights stay in CPU or GPU caches)" : "");
  }
  bool slower = false;
  if (before) {
    for (const auto& [name, speed] : speeds_of(out, out, prompt, contexts)) {
      const double ratio = speed / old.at(name);
      slower = slower || ratio < 0.95;
      out["compared"][name] = ratio;
      say(name, ": ", fixed(ratio, 3), "x the earlier speed");
    }
  }
  if (settings.json) print(out);
  return slower ? 1 : 0;
}

// Hides a number in a long text, and asks the model for it at the end.
int passkey(const Settings& given, int64_t length, double depth) {
  if (!(depth >= 0 && depth <= 1)) throw Error("--depth: ", depth, " is not between 0 and 1");
  Settings settings = given;
  if (settings.most < 0) settings.most = 12;
  Session session(settings);
  session.choice.temperature = 0;
  session.load(1);
  const uint64_t key = 10000 + session.seed % 90000;
  const std::string filler =
                        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. ",
                    digits = std::to_string(key);
  const std::string begin =
                        "There is important information hidden in a lot of irrelevant text. Find it and memorize it. ",
                    needle = "The pass key is " + digits + ". Remember it. " + digits + " is the pass key. ",
                    question = "What is the pass key? The pass key is";
  const auto prompt = [&](int64_t copies) {
    const int64_t before = int64_t(double(copies) * depth);
    std::string text = begin;
    for (int64_t i = 0; i < copies; ++i) text += (i == before ? needle : std::string()) + filler;
    return session.tokenizer->encode(text + (before >= copies ? needle : std::string()) + question);
  };
  const char* const asked = length == 0 ? "--context: " : "--length: ";
  if (length == 0) length = session.model->context() - settings.most;
  // Copies are not all of one size, as tokens may span two of them.
  const int64_t one = int64_t(prompt(1).size()), many = 16,
                each = std::max<int64_t>(1, (int64_t(prompt(1 + many).size()) - one) / many);
  if (length < one) throw Error(asked, length, " tokens of a prompt, but at least ", one, " are needed");
  int64_t copies = 1 + (length - one) / each;
  auto ids = prompt(copies);
  for (int64_t more; copies > 1 && (more = int64_t(ids.size()) - length) > 0;) {
    copies = std::max<int64_t>(1, copies - std::max<int64_t>(1, more / each));
    ids = prompt(copies);
  }
  Session::Times times;
  const auto answer = session.generate({ids}, {}, times)[0].written;
  const bool found = answer.find(digits) != std::string::npos;
  if (settings.json) {
    Json out = {{"tokens", ids.size()}, {"depth", depth}, {"key", digits}, {"answer", answer}, {"found", found}};
    out.update(session.about());
    print(out);
  } else {
    print(found ? "found" : "not found", ": pass key ", digits, ", prompt ", ids.size(), " tokens, answer:", answer);
  }
  return found ? 0 : 1;
}

}  // namespace llm
