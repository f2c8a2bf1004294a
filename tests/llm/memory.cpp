// What memory there is, and what is said of a model that does not fit into it.
#include <sys/resource.h>

#include <fstream>
#include <functional>

#include "golden.h"
#include "part.h"
#include "support/catch.h"

using namespace golden;

namespace {

// A folder with files as /proc and /sys have them; sizes in megabytes.
class Machine : public Folder {
 public:
  void put(const std::string& name, const std::string& text) const {
    fs::create_directories(fs::path(path() + "/" + name).parent_path());
    write(name, text);
  }
  void group(const std::string& at, const std::string& most, int64_t taken, int64_t files = 0) const {
    put("sys/fs/cgroup" + at + "/memory.max", most + "\n");
    put("sys/fs/cgroup" + at + "/memory.current", std::to_string(taken << 20) + "\n");
    put("sys/fs/cgroup" + at + "/memory.stat",
        "anon 5\ninactive_file " + std::to_string(files << 20) + "\nactive_file 0\n");
  }
  size_t left() const { return llm::memory_left(path()) >> 20; }
};

std::string bytes(int64_t megabytes) { return std::to_string(megabytes << 20); }

std::unique_ptr<llm::Device> with_memory(size_t free) {
  const std::set<Type> all{Type::f32, Type::f16, Type::bf16, Type::f8, Type::i8, Type::i4};
  return std::make_unique<Part>(all, Type::f32, free);
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("the memory that is left is the machine's, or its container's") {
  const Machine machine;
  machine.put("proc/meminfo", "MemTotal: 99999999 kB\nMemFree: 7 kB\nMemAvailable:    1024000 kB\n");
  CHECK(machine.left() == 1000);
  machine.group("", "max", 300);
  CHECK(machine.left() == 1000);
  machine.group("", bytes(600), 250);
  CHECK(machine.left() == 350);
  machine.group("", bytes(600), 250, 200);  // of files that are cached
  CHECK(machine.left() == 550);
  machine.group("", bytes(600), 700);
  CHECK(machine.left() == 0);
  machine.group("", bytes(5000), 100);
  CHECK(machine.left() == 1000);

  // A group within others, each with a limit.
  machine.put("proc/self/cgroup", "0::/a/b\n");
  machine.group("/a", bytes(800), 100);
  CHECK(machine.left() == 700);
  machine.group("/a/b", bytes(500), 100);
  CHECK(machine.left() == 400);
  machine.put("proc/self/cgroup", "0::/elsewhere/b\n");  // as it is called outside of the container
  CHECK(machine.left() == 1000);

  machine.put("proc/self/cgroup", "3:cpu,cpuacct:/x\n4:memory:/y\n0::/\n");
  machine.put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  machine.put("sys/fs/cgroup/memory/memory.usage_in_bytes", bytes(100));
  CHECK(machine.left() == 1000);
  machine.put("sys/fs/cgroup/memory/memory.limit_in_bytes", bytes(400));
  machine.put("sys/fs/cgroup/memory/memory.stat", "inactive_file 9\ntotal_inactive_file " + bytes(30) + "\n");
  CHECK(machine.left() == 330);
  machine.put("sys/fs/cgroup/memory/y/memory.limit_in_bytes", bytes(20));
  CHECK(machine.left() == 20);
}

TEST_CASE("the memory that is left ends where the process may have no more") {
  const auto device = llm::make_cpu(1);
  struct rlimit before {};
  REQUIRE(getrlimit(RLIMIT_AS, &before) == 0);
  const size_t usual = device->free_bytes();
  struct rlimit limit = before;
  limit.rlim_cur = size_t(3) << 30;
  size_t pages = 0;  // sanitizers take more than there is
  std::ifstream("/proc/self/statm") >> pages;
  if (pages >= limit.rlim_cur / 4096 / 2 || limit.rlim_cur > before.rlim_max || usual < limit.rlim_cur)
    return test::skip("needs 3 GB, and no limit below");
  REQUIRE(setrlimit(RLIMIT_AS, &limit) == 0);
  std::ifstream("/proc/self/statm") >> pages;
  const size_t limited = device->free_bytes(), with_mapped = device->free_bytes(size_t(64) << 20);
  REQUIRE(setrlimit(RLIMIT_AS, &before) == 0);
  // All that has addresses counts, libraries and mapped files as well, and something is left for the rest.
  CHECK(limited < limit.rlim_cur - pages * 4096 - (size_t(32) << 20));
  CHECK(limited > 0);
  CHECK(with_mapped == std::min(usual, limited + (size_t(64) << 20)));
}

TEST_CASE("what does not fit is refused with all of its parts and an option that helps") {
  const Json golden = read("llama");
  const ModelFolder folder(golden);
  const auto refusal = [&](size_t free, const std::function<void(llm::Settings&)>& change, int64_t texts = 1) {
    llm::Settings settings;
    settings.directory = folder.path(), settings.device = "cpu", settings.quiet = true, settings.cache = "fp32";
    change(settings);
    llm::Session session(settings);
    session.device = with_memory(free);
    try {
      session.load(texts);
    } catch (const llm::Error& e) {
      return std::string(e.what());
    }
    return session.model->plan().changes();
  };
  const auto nothing = [](llm::Settings&) {};
  CHECK(refusal(size_t(1) << 30, nothing) == "");

  // The weights, which are mapped.
  std::string why = refusal(70000, nothing);
  CHECK(has(why, "1 MB weights (1 MB memory-mapped)"));
  why = refusal(70000, [](llm::Settings& s) { s.chunk = 1; });
  CHECK(has(why, "try --weights int8 or --context"));
  why = refusal(20000, [](llm::Settings& s) { s.chunk = 1, s.weights = "int8"; });
  CHECK_FALSE(has(why, "int8"));

  // Keys and values.
  why = refusal(1 << 20, [](llm::Settings& s) { s.context = 100000; }, 4);
  CHECK(has(why, "KV cache (4 x 100000 tokens)"));
  CHECK(has(why, "try a smaller --context, --cache int8 or a smaller batch"));
  CHECK_FALSE(has(why, "fp8"));
  why = refusal(1 << 20, [](llm::Settings& s) { s.context = 100000, s.cache = "int8"; });
  CHECK(has(why, "try a smaller --context"));
  CHECK_FALSE(has(why, "--cache"));

  // Activations.
  why = refusal(1 << 20, [](llm::Settings& s) { s.context = 4096, s.chunk = 4096, s.cache = "int8"; });
  CHECK(has(why, "try a smaller --chunk"));
}

TEST_CASE("that weights are larger than the memory that is left is said") {
  const Json golden = read("llama");
  const ModelFolder folder(golden);
  llm::Settings settings;
  settings.directory = folder.path(), settings.device = "cpu", settings.quiet = true, settings.context = 8;
  llm::Session session(settings);
  const auto plan = [&](size_t free) {
    session.device = with_memory(free);
    return llm::Model::plan(session.config, *session.weights, *session.device, session.options(1));
  };
  const llm::Plan roomy = plan(size_t(1) << 30);
  CHECK_FALSE(roomy.is_tight());
  CHECK(roomy.changes() == "");
  REQUIRE(roomy.mapped > 0);
  const llm::Plan tight = plan(roomy.total() + roomy.mapped / 2);
  CHECK(tight.is_tight());
  CHECK(has(tight.changes(), "weights are read from disk at every step"));
  CHECK_FALSE(has(tight.changes(), "not compiled in"));
}
