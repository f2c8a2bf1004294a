#include "session.h"

#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <limits>
#include <random>
#include <set>

#include "fields.h"

namespace llm {
namespace {

std::atomic<int> interrupts{0}, allowed_interrupts{1};

int type_of(const std::string& name, const char* option, const char* otherwise, Type first, Type last) {
  if (name == otherwise) return -1;
  std::string all = otherwise;
  for (int i = int(first); i <= int(last); ++i) {
    if (name == name_of(Type(i))) return i;
    all += std::string(", ") + name_of(Type(i));
  }
  throw Error(option, ": ", shown(name), " is not one of ", all);
}
int weights_type_of(const Settings& settings) {
  return type_of(settings.weights, "--weights", "stored", Type::f32, Type::i4);
}

// Older versions of transformers write all fields, most of them with values that change nothing.
bool changes_nothing(const std::string& name, const Json& value) {
  static const std::set<std::string> ones{"num_beams",      "num_beam_groups", "num_return_sequences",
                                          "length_penalty", "typical_p",       "encoder_repetition_penalty",
                                          "guidance_scale"},
      zeros{"epsilon_cutoff",   "eta_cutoff",       "diversity_penalty",    "penalty_alpha",
            "presence_penalty", "min_length",       "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
            "min_new_tokens",   "frequency_penalty"};
  if (value.is_number()) return (value == 1 && ones.count(name) > 0) || (value == 0 && zeros.count(name) > 0);
  return value.empty() || value == false || value == "";
}

}  // namespace

std::vector<int32_t> lookup(const std::vector<int32_t>& ids, int64_t most) {
  const int64_t n = int64_t(ids.size());
  int64_t best = 1, from = n;
  for (int64_t end = n - 1; end > 0 && best < 4; --end) {
    int64_t same = 0;
    while (same < 4 && same < end && ids[size_t(end - 1 - same)] == ids[size_t(n - 1 - same)]) ++same;
    if (same > best) best = same, from = end;
  }
  std::vector<int32_t> out(size_t(from < n ? std::max<int64_t>(0, most) : 0));
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = from + int64_t(i) < n ? ids[size_t(from) + i] : out[size_t(from) + i - size_t(n)];
  return out;
}

bool interrupted() { return interrupts > 0; }

void catch_interrupts(int times) {
  allowed_interrupts = times, interrupts = 0;
  std::signal(SIGINT, [](int) {
    if (interrupts.fetch_add(1) >= allowed_interrupts) _exit(130);
  });
}

ProgressLine::ProgressLine(const Settings& settings, const char* what, double after)
    : what_(what), shows_(can_show(settings)), next_(seconds_now() + after) {}

bool ProgressLine::can_show(const Settings& settings) { return !settings.quiet && isatty(2) != 0; }

void ProgressLine::show(double share) {
  if (!shows_ || seconds_now() < next_) return;
  next_ = seconds_now() + 0.2, is_there_ = true;
  std::fprintf(stderr, "\r%s %3.0f %%", what_.c_str(), share * 100);
}

void ProgressLine::erase() {
  if (!is_there_) return;
  is_there_ = false;
  // Also erases the ^C that terminals write when Ctrl-C is pressed.
  std::fprintf(stderr, "\r%*s\r", int(what_.size() + std::string(" 100 %^C").size()), "");
}

std::string Stops::add(const std::string& text, bool& found) {
  held_ += text;
  size_t end = std::string::npos, begin = 0, hold = 0;
  for (const std::string& stop : *stops_) {
    const size_t at = stop.empty() ? std::string::npos : held_.find(stop);
    if (at == std::string::npos || at + stop.size() > end || (at + stop.size() == end && at > begin)) continue;
    begin = at, end = at + stop.size();
  }
  found = end != std::string::npos;
  if (found) return take(begin);
  for (const std::string& stop : *stops_) {
    for (size_t n = std::min(stop.size(), held_.size()); n > hold; --n) {
      if (held_.compare(held_.size() - n, n, stop, 0, n) == 0) hold = n;
    }
  }
  return take(held_.size() - hold);
}

std::string Stops::take(size_t n) {
  std::string out = held_.substr(0, n);
  held_.erase(0, n);
  return out;
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double negative_log_likelihood(const float* logits, int64_t count, int32_t id) {
  const double top = double(*std::max_element(logits, logits + count));
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += std::exp(double(logits[i]) - top);
  return top + std::log(sum) - double(logits[id]);
}

Session::Session(const Settings& all) : settings(all) {
  const std::string& directory = settings.directory;
  if (directory.empty()) throw Error("--model: the directory is empty");
  if (!file_exists(directory + "/config.json")) {
    if (const std::string why = why_no_weights(directory); !why.empty()) throw Error(directory + ": " + why);
  }
  config = read_config(llm::read_json(directory + "/config.json"));
  say_unread("config.json", config.unread);
  generation = Json::object();
  if (file_exists(directory + "/generation_config.json"))
    generation = llm::read_json(directory + "/generation_config.json");
  weights.emplace(directory);
  tokenizer.emplace(directory);
  for (const char* name : {"bos_token", "eos_token"}) {
    const std::string text = tokenizer->special_names.value(name, "");
    if (!text.empty() && tokenizer->id_of(text) < 0)
      settings.say("tokenizer_config.json: ", name, ": ", shown(text), " is not in the vocabulary");
  }

  const Json variables = template_variables(settings.template_variables);
  try {
    format.emplace(*tokenizer, settings.chat_template, variables);
  } catch (const Error& e) {
    why_no_format = e.what();
  }

  find_stops();
  read_sampling();
  choose_device();
}

// A text ends at any token that one of the files names as an end, and at the token that ends an answer of a chat.
void Session::find_stops() {
  std::set<int64_t> ends(config.eos.begin(), config.eos.end());
  for (const int64_t id : Fields(generation, "generation_config.json").token_ids("eos_token_id")) ends.insert(id);
  if (tokenizer->eos >= 0) ends.insert(tokenizer->eos);
  if (format && format->turn_end >= 0) ends.insert(format->turn_end);
  for (const int64_t id : ends) {
    if (id >= 0 && id < config.vocabulary) stops.push_back(int32_t(id));
  }
  for (const Tokenizer::Added& token : tokenizer->added()) {
    if (std::find(settings.stops.begin(), settings.stops.end(), token.text) != settings.stops.end())
      asked_stops.push_back(token.id);
  }
}

int64_t Session::tokens() const { return std::min(config.vocabulary, tokenizer->size()); }

void Session::say_unread(const char* file, const std::vector<std::string>& fields) const {
  std::vector<std::string> names;
  for (const std::string& name : fields) names.push_back(shown(name));
  if (!names.empty()) settings.say(file, ": ignored: ", listed(names));
}

// Options that are not given have the values of generation_config.json. --top-k, --top-p and --min-p imply sampling.
void Session::read_sampling() {
  const Fields fields(generation, "generation_config.json");
  const bool draws = fields.flag("do_sample", false) || settings.top_k.value_or(0) > 0 ||
                     settings.top_p.value_or(1) < 1 || settings.min_p.value_or(0) > 0;
  const auto stated = [&](const char* name, double otherwise) {
    constexpr double any = std::numeric_limits<double>::max();
    return fields.number(name, -any, any, otherwise);
  };
  const auto checked = [](const char* name, double x, double low, double high) {
    if (x >= low && x <= high) return float(x);
    throw Error(name, " (option or generation_config.json): ", x, " is not between ", low, " and ", high);
  };
  const double temperature = stated("temperature", 1), top_p = stated("top_p", 1), min_p = stated("min_p", 0),
               penalty = stated("repetition_penalty", 1);
  const int64_t top_k = fields.integer("top_k", -1, std::numeric_limits<int64_t>::max(), 0);
  choice = {checked("temperature", settings.temperature.value_or(draws ? temperature : 0), 0, 100),
            checked("top_p", settings.top_p.value_or(draws ? top_p : 1), 0, 1),
            checked("min_p", settings.min_p.value_or(draws ? min_p : 0), 0, 1),
            checked("repetition_penalty", settings.repetition_penalty.value_or(penalty), 1e-6, 1e6),
            int32_t(settings.top_k.value_or(draws ? std::clamp<int64_t>(top_k, 0, 1000000000) : 0))};
  seed = settings.seed ? *settings.seed : std::random_device{}();
  for (const std::string& stop : settings.stops) {
    if (stop.empty()) throw Error("--stop: the string is empty");
    if (valid_utf8(stop) != stop) throw Error("--stop: ", shown(valid_utf8(stop)), " is not UTF-8");
  }

  fields.ignore({"eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version",
                 "_from_model_config", "use_cache", "cache_implementation", "cache_config", "return_legacy_cache",
                 "output_attentions", "output_hidden_states", "output_scores", "output_logits",
                 "return_dict_in_generate", "num_assistant_tokens", "num_assistant_tokens_schedule",
                 "assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size",
                 "disable_compile", "compile_config"});
  std::vector<std::string> unread;
  for (const std::string& name : fields.unread()) {
    if (!changes_nothing(name, generation[name])) unread.push_back(name);
  }
  say_unread("generation_config.json", unread);
}

void Session::choose_device() {
  if (settings.device != "auto" && settings.device != "cpu" && settings.device != "gpu")
    throw Error("--device: ", shown(settings.device), " is not one of auto, cpu, gpu");
  if (settings.device != "cpu") {
    std::string why;
    device = make_gpu(activation_type(weights_type_of(settings), weights->all()), settings.threads, why);
    if (device == nullptr && settings.device == "gpu") throw Error("--device gpu: ", why);
    if (device == nullptr) settings.say("running on the CPU: ", why);
  }
  if (device == nullptr) device = make_cpu(settings.threads);
}

ModelOptions Session::options(int64_t sequences) const {
  ModelOptions out;
  if (config.lengths_matter()) sequences = 1;
  out.weights = weights_type_of(settings);
  out.inputs = type_of(settings.inputs, "--inputs", "auto", Type::f8, Type::i8);
  out.cache = type_of(settings.cache, "--cache", "auto", Type::f32, Type::i8);
  out.sequences = sequences, out.context = settings.context, out.page = settings.page, out.chunk = settings.chunk,
  out.guesses = settings.lookup, out.sinks = settings.sinks, out.batch_invariant = settings.batch_invariant;
  return out;
}

void Session::load(int64_t sequences) {
  {
    ProgressLine loading(settings, "loading weights", 0.2);
    model.emplace(config, *weights, *device, options(sequences), [&](double share) { loading.show(share); });
  }
  say_changes(model->plan());
  const int64_t context = model->context(), positions = config.positions;
  if (settings.sinks < 0 && context > positions)
    settings.say("warning: the model was trained for ", positions, " tokens, the context is ", context);
  if (settings.context == 0 && context < positions)
    settings.say("context reduced from ", positions, " to ", context, " tokens to fit into memory; --context sets it");
}

Json Session::about() const {
  return {{"device", device->name()}, {"context", model->context()}, {"positions", config.positions}};
}

void Session::check(const std::vector<Tokenizer::Ids>& prompts, const std::vector<int64_t>& lines) const {
  for (size_t i = 0; i < prompts.size(); ++i) {
    const std::string which = i < lines.size()     ? concat("the prompt in line ", lines[i])
                              : prompts.size() > 1 ? concat("prompt ", i + 1)
                                                   : "the prompt";
    if (prompts[i].empty()) throw Error(which, " is empty, and the tokenizer adds no BOS");
    if (settings.sinks < 0 && int64_t(prompts[i].size()) >= model->context())
      throw Error(which, " has ", prompts[i].size(), " tokens, but the context is ", model->context(),
                  "; try a larger --context");
  }
}

void Session::say_changes(const Plan& plan) const {
  const std::string changes = plan.changes();
  if (!changes.empty()) settings.say("weights: ", changes);
}

namespace {

// Generates several texts together.
class Writer {
 public:
  // The prompts are those from number `first` on of all.
  Writer(Session& session, const std::vector<Tokenizer::Ids>& prompts, size_t first, const Session::Print& print,
         Session::Times& times)
      : s_(session), print_(print), times_(times), first_(first), texts_(prompts.size()), streams_(prompts.size()) {
    for (size_t i = 0; i < prompts.size(); ++i)
      texts_[i].ids = prompts[i], to_read_ += texts_[i].prompt = int64_t(prompts[i].size());
    holds_.assign(prompts.size(), Stops(settings_.stops));
  }

  std::vector<Session::Text> all(int64_t known) {
    double begin = seconds_now();
    goes_on_ = known >= 0;
    known = std::max<int64_t>(0, known);
    to_read_ -= known;
    for (size_t i = 0; i < texts_.size(); ++i) {
      read(i, i == 0 ? known : 0);
      times_.prompt_seconds += seconds_now() - begin;
      begin = seconds_now();
    }
    times_.firsts = times_.decoded;
    write();
    times_.decode_seconds += seconds_now() - begin;
    return std::move(texts_);
  }

 private:
  using Text = Session::Text;
  static bool is_open(const Text& text) { return text.finish == nullptr; }
  bool is_long_enough(const Text& text) const {
    return settings_.most >= 0 && int64_t(text.ids.size()) - text.prompt >= settings_.most;
  }

  // Takes the next token of a text.
  void take(size_t i) {
    Text& text = texts_[i];
    if (is_long_enough(text)) return void(text.finish = "length");
    const int32_t id = model_.token(int64_t(i), int64_t(text.ids.size()));
    const auto is_in = [&](const std::vector<int32_t>& ends) {
      return std::find(ends.begin(), ends.end(), id) != ends.end();
    };
    const bool ends = is_in(s_.asked_stops) || (!settings_.ignore_eos && is_in(s_.stops));
    bool found = false;
    std::string more = ends ? "" : holds_[i].add(streams_[i].add(s_.tokenizer->bytes(id)), found);
    text.read = int64_t(text.ids.size());
    text.ids.push_back(id);
    times_.decoded += 1;
    if (ends || found)
      text.finish = "stop";
    else if (is_long_enough(text) || (settings_.sinks < 0 && int64_t(text.ids.size()) >= model_.context()))
      text.finish = "length";
    else if (interrupted())
      text.finish = "interrupted";
    if (text.finish != nullptr && !found) {
      more += holds_[i].add(streams_[i].end(), found);
      if (found) text.finish = "stop";
      else more += holds_[i].rest();
    }
    text.written += more;
    if (print_ && !more.empty()) print_(first_ + i, more);
  }

  // Tokens that the tokenizer does not have are never sampled.
  void begin(size_t i) { model_.begin(int64_t(i), texts_[i].ids, s_.choice, s_.tokens(), s_.seed + first_ + i); }

  // Reads a prompt, and takes the first token after it.
  void read(size_t i, int64_t from) {
    Text& text = texts_[i];
    begin(i);
    // In pieces, so that it can be interrupted. Beyond the context, where tokens are read one by one, pieces are short.
    // Where angles depend on the length of the text, the prompt is one piece, because the whole length has to be known.
    int64_t at = from;
    for (int64_t n = 0; at < text.prompt && !interrupted(); at += n) {
      n = s_.config.lengths_matter() ? text.prompt : at < model_.context() ? model_.chunk() : 8;
      n = std::min(n, text.prompt - at);
      const int64_t before = was_read_ + at - from;
      model_.read(int64_t(i), at, text.ids.data() + at, n,
                  [&](double share) { reading_.show((double(before) + share * double(n)) / double(to_read_)); });
    }
    reading_.erase();
    text.read = std::min(at, text.prompt);
    was_read_ += text.read - from;
    times_.prompt_tokens += text.read - from;
    if (text.read < text.prompt) {
      text.finish = "interrupted";
    } else {
      model_.choose_next(int64_t(i));
      take(i);
    }
  }

  // Queues some steps ahead of the one whose tokens are awaited. A text that has ended goes on, unseen, until all have.
  void write() {
    int64_t longest = 0;
    for (const Text& text : texts_) longest = std::max(longest, int64_t(text.ids.size()));
    for (int64_t asked = 0, done = 0; std::any_of(texts_.begin(), texts_.end(), is_open); ++done) {
      if (s_.config.stale(longest + done - 1, longest + done)) {  // the angles of all keys change; there is one text
        begin(0);
        model_.read(0, 0, texts_[0].ids.data(), int64_t(texts_[0].ids.size()));
        model_.choose_next(0);
        asked = done + 1;
      }
      times_.steps += 1;
      if (settings_.lookup > 0) {
        done += guess(asked <= done);
        asked = done + 1;
        continue;
      }
      // In a ring, steps beyond the end of the text would replace keys that are needed when it is continued.
      const bool none_ahead = s_.config.lengths_matter() || (goes_on_ && settings_.sinks >= 0);
      const int64_t ahead = none_ahead ? 0 : s_.device->ahead();
      for (; asked <= done + ahead; ++asked) model_.step(std::min(model_.context(), longest + asked));
      for (size_t i = 0; i < texts_.size(); ++i) {
        if (is_open(texts_[i])) take(i);
      }
    }
  }

  // A step with guesses for the one text. steps: the next token has not been asked for yet. Returns how many guesses
  // were right; it takes one token more than that.
  int64_t guess(bool steps) {
    Text& text = texts_[0];
    const int64_t length = int64_t(text.ids.size());
    std::vector<int32_t> guesses;
    if (steps) {
      // Angles that depend on the length of the text would be those of a text with all guesses in it.
      if (!s_.config.lengths_matter()) guesses = lookup(text.ids, std::min(reach_, model_.context() - length));
      model_.step(length, text.ids.back(), guesses);
    }
    size_t right = 0;
    for (take(0); is_open(text) && right < guesses.size() && text.ids.back() == guesses[right]; ++right) take(0);
    if (!guesses.empty())
      reach_ = right == guesses.size() ? std::min(settings_.lookup, 2 * reach_) : int64_t(right) + 1;
    return int64_t(right);
  }

  Session& s_;
  const Settings& settings_ = s_.settings;
  Model& model_ = *s_.model;
  const Session::Print& print_;
  Session::Times& times_;
  const size_t first_;
  bool goes_on_ = false;
  std::vector<Text> texts_;
  std::vector<Utf8Stream> streams_;
  std::vector<Stops> holds_;
  ProgressLine reading_{settings_, "reading prompt", 1};
  int64_t to_read_ = 0, was_read_ = 0;  // tokens of all prompts
  int64_t reach_ = settings_.lookup;    // how many tokens to guess: grows with right guesses, shrinks with wrong ones
};

}  // namespace

std::vector<Session::Text> Session::generate(const std::vector<Tokenizer::Ids>& prompts, const Print& print,
                                             Times& times, int64_t known) {
  check(prompts);
  if (!config.lengths_matter()) return Writer(*this, prompts, 0, print, times).all(known);
  std::vector<Text> texts;
  for (size_t i = 0; i < prompts.size(); ++i)
    texts.push_back(Writer(*this, {prompts[i]}, i, print, times).all(known)[0]);
  return texts;
}

}  // namespace llm
