#include "chat.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "fields.h"

namespace llm {

Chat::Chat(Session& session, const std::string& system) : session_(session) {
  if (!session.format) throw Error(session.why_no_format);
  if (!system.empty()) messages.push_back({"system", valid_utf8(system)});
}

Chat::Answer Chat::say(const std::string& message, const Session::Print& print) {
  std::vector<Message> all = messages;
  all.push_back({"user", valid_utf8(message)});
  const Tokenizer::Ids ids = session_.format->ids(all);
  const int64_t context = session_.model->context();
  const bool ring = session_.settings.sinks >= 0;
  if (!ring && int64_t(ids.size()) >= context)
    throw Error("with this message the conversation has ", ids.size(), " tokens, but the context is ", context,
                ": message ignored; try /reset, a larger --context, or --sinks to drop the oldest tokens");
  Answer out;
  if (!session_.config.stale(int64_t(cached_.size()), int64_t(ids.size()))) {
    const size_t most = std::min(cached_.size(), ids.size() - 1);  // the last token is always read, for its logits
    out.kept = std::mismatch(ids.begin(), ids.begin() + int64_t(most), cached_.begin()).first - ids.begin();
  }
  // A ring that has wrapped around cannot go back to an earlier place in the text, whose keys are gone.
  if (ring && int64_t(cached_.size()) > context && size_t(out.kept) < cached_.size()) out.kept = 0;
  cached_.clear();  // unknown until the answer is there
  out.text = session_.generate({ids}, print, out.times, out.kept)[0];
  cached_.assign(out.text.ids.begin(), out.text.ids.begin() + out.text.read);
  messages = all;
  messages.push_back({"assistant", out.text.written});
  return out;
}

void Chat::reset() { messages.resize(!messages.empty() && messages[0].role == "system" ? 1 : 0); }

void Chat::save(const std::string& file) const {
  Json out = Json::array();
  for (const Message& message : messages) out.push_back({{"role", message.role}, {"content", message.content}});
  // Written to a file beside it and renamed, so that a failure leaves the old one as it is. Pipes and devices are
  // written directly.
  namespace fs = std::filesystem;
  std::error_code none;
  const fs::path real = fs::canonical(file, none), at = none ? fs::path(file) : real;
  const bool is_there = fs::exists(at, none), replaces = !is_there || fs::is_regular_file(at, none);
  const std::string to = at.string() + (replaces ? ".new" + std::to_string(getpid()) : "");
  std::ofstream stream(to);
  if (replaces && is_there) fs::permissions(to, fs::status(at, none).permissions(), none);
  stream << out.dump(1) << '\n';
  bool written = bool(stream.flush());
  stream.close();
  if (replaces && written) fs::rename(to, at, none), written = !none;
  if (written) return;
  if (replaces) fs::remove(to, none);
  throw Error("cannot write ", file);
}

void Chat::load(const std::string& file) {
  const Json json = read_json(file);
  if (!json.is_array()) throw Error(file, ": not a JSON array of messages");
  std::vector<Message> read;
  for (const Json& message : json) {
    const Fields fields(message, file + ": a message");
    read.push_back({fields.text("role"), fields.text("content")});
  }
  messages = read;
}

namespace {

constexpr const char* kHelp =
    "/reset        start a new conversation\n"
    "/save FILE    save the conversation as JSON\n"
    "/load FILE    continue a saved conversation\n"
    "/exit, /quit  exit, as the end of the input does\n"
    "TEXT\\         continue the message on the next line\n"
    "//TEXT        send a message that starts with /\n"
    "Ctrl-C        stop the answer; at the prompt: exit";

// Reads a message or a command. False at the end of the input.
bool read_line(std::istream& in, std::string& text) {
  text.clear();
  for (std::string line; std::getline(in, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    const bool more = !line.empty() && line.back() == '\\';
    if (more) line.back() = '\n';
    text += line;
    if (!more) return true;
  }
  return !text.empty();
}

Json json_of(const Chat::Answer& answer, const Session& session) {
  const Session::Text& text = answer.text;
  const Session::Times& t = answer.times;
  Json out = {{"text", text.written},           {"ids", Tokenizer::Ids(text.ids.begin() + text.prompt, text.ids.end())},
              {"finish_reason", text.finish},   {"seed", session.seed},
              {"prompt_tokens", text.prompt},   {"kept_tokens", answer.kept},
              {"read_tokens", t.prompt_tokens}, {"prompt_seconds", t.prompt_seconds},
              {"decoded_tokens", t.decoded},    {"decode_seconds", t.decode_seconds}};
  out.update(session.about());
  return out;
}

void print_counts(const Chat::Answer& answer, const Session& session) {
  const Session::Times& t = answer.times;
  const Settings& settings = session.settings;
  settings.say("(", answer.text.finish, "; prompt: ", answer.kept, " cached and ", t.prompt_tokens,
               " new tokens; output: ", t.decoded, " tokens", t.speed(), "; seed ", session.seed,
               ")");
  const int64_t context = session.model->context();
  if (settings.sinks < 0 && int64_t(answer.text.ids.size()) >= context)
    settings.say("(the context of ", context, " tokens is full)");
}

// Obeys a line that begins with /. False if it ends the conversation.
bool obey(Chat& chat, const std::string& line) {
  const size_t space = line.find(' ');
  const std::string command = line.substr(0, space), file = space == std::string::npos ? "" : line.substr(space + 1);
  if (command == "/exit" || command == "/quit") return false;
  if (command == "/reset")
    chat.reset();
  else if (command == "/help")
    std::fprintf(stderr, "%s\n", kHelp);
  else if ((command == "/save" || command == "/load") && file.empty())
    throw Error(command, ": no file name; usage: ", command, " FILE");
  else if (command == "/save")
    chat.save(file);
  else if (command == "/load")
    chat.load(file);
  else
    throw Error(shown(command), ": unknown command; /help lists them");
  return true;
}

}  // namespace

int chat(const Settings& settings, const ChatOptions& options, std::istream& in, std::FILE* out) {
  Session session(settings);
  Chat chat(session, options.system);
  if (!options.load.empty()) chat.load(options.load);
  session.load(1);
  const bool asks = isatty(0) != 0 && isatty(2) != 0;
  if (asks) settings.say(kHelp);
  int result = 0;

  const auto say = [&](const std::string& message) {
    const Chat::Answer answer = chat.say(message, [&](size_t, const std::string& more) {
      if (!settings.json) put(out, more);
    });
    put(out, (settings.json ? json_of(answer, session).dump() : "") + "\n");
    print_counts(answer, session);
  };
  for (std::string line;;) {
    catch_interrupts(0);
    if (asks) std::fputs("> ", stderr);
    if (!read_line(in, line)) break;
    catch_interrupts(1);
    try {
      if (line.empty()) continue;
      if (line[0] != '/') say(line);
      else if (line.size() > 1 && line[1] == '/') say(line.substr(1));
      else if (!obey(chat, line)) break;
    } catch (const OutputError&) {
      throw;
    } catch (const Error& e) {
      result = 1;
      std::fprintf(stderr, "error: %s\n", shown(e.what(), 600).c_str());
      if (settings.json) put(out, Json{{"error", valid_utf8(e.what())}}.dump() + "\n");
    }
  }
  if (asks) std::fputc('\n', stderr);
  return asks ? 0 : result;
}

}  // namespace llm
