// The CPU as a device: it chooses among the instruction sets that are compiled in. CMake lists their calls in LLM_UNITS
// as CALLS(type, name), the best last.
#include "device/device.h"

#include <malloc.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <kernels/cpu/exec.h>
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>

namespace llm {

#define CALLS(type, name) extern const type name;
LLM_UNITS
#undef CALLS

namespace {

// The first CPU of a list of rising numbers and ranges ("0-1,8"), or -1 if this is no such list or `cpu` is not in it.
int first_of(const std::string& list, int cpu) {
  std::istringstream in(list);
  int first = -1, last = -1;
  bool found = false;
  do {
    int from = 0;
    if (!(in >> from) || from <= last) return -1;
    if (first < 0) first = from;
    last = from;
    if (in.peek() == '-' && (!(in.ignore() >> last) || last <= from)) return -1;
    found = found || (from <= cpu && cpu <= last);
  } while (in.peek() == ',' && in.ignore());
  return found && (in >> std::ws).eof() ? first : -1;
}

// The number at the beginning of a file, or after a word in it, if there is one.
std::optional<size_t> read_number(const std::string& path, const std::string& word = "") {
  std::ifstream file(path);
  for (std::string name; name != word && file >> name;) {
  }
  size_t number = 0;
  return file >> number ? std::optional<size_t>(number) : std::nullopt;
}

std::optional<size_t> limit_of(int resource) {
  struct rlimit limit {};
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return {};
  return size_t(limit.rlim_cur);
}

// The bytes of addresses that `ulimit -v` leaves. Everything that is mapped takes some: libraries, files, and the
// stacks of threads, which may not have started yet. 32 MB are kept for allocations beside the model.
size_t addresses_left(int threads) {
  const size_t all = limit_of(RLIMIT_AS).value_or(SIZE_MAX), stack = limit_of(RLIMIT_STACK).value_or(size_t(8) << 20),
               taken = read_number("/proc/self/statm").value_or(0) * size_t(sysconf(_SC_PAGESIZE)),
               kept = (size_t(32) << 20) + size_t(threads) * stack;
  return all == SIZE_MAX ? all : all > taken + kept ? all - taken - kept : 0;
}

class Cpu : public Device {
 public:
  explicit Cpu(int threads) {
    place_.threads = threads_of(threads);
#if defined(__GLIBC__)
    if (limit_of(RLIMIT_AS)) mallopt(M_ARENA_MAX, 1);  // an arena for each thread would take 64 MB of addresses
#endif
    // The last unit that the machine can run, or the one that LLM_UNIT names.
    const char* const wanted = std::getenv("LLM_UNIT");
    Units units;
#define CALLS(type, name) units.add(name);
    LLM_UNITS
#undef CALLS
    std::vector<std::string> names;
    for (const Calls& unit : units) {
      names.push_back(unit.rows->name);
      if (kernels::cpu::machine_has(unit.rows->needs) && (wanted == nullptr || shown(wanted) == unit.rows->name))
        calls_ = unit;
    }
    if (calls_.rows == nullptr)
      throw Error(wanted != nullptr ? "LLM_UNIT=" + shown(wanted) : "this CPU",
                  " is not supported here; compiled in: ", listed(names), " (set by -DKERNELS_LLM_UNITS)");
  }

  std::string name() const override {
    return concat("CPU, ", place_.threads, place_.threads == 1 ? " thread, " : " threads, ", rows().name);
  }
  bool is_host() const override { return true; }
  size_t free_bytes(size_t mapped) const override {
    const size_t addresses = addresses_left(place_.threads);
    return std::min(memory_left(""), addresses > SIZE_MAX - mapped ? SIZE_MAX : addresses + mapped);
  }
  std::shared_ptr<void> allocate(size_t bytes, bool) override {
    if (bytes > memory_left("")) return nullptr;
    // The pages of calloc are allocated when they are touched, so a long context costs only what is used of it.
    size_t room = bytes + 255;
    void* const base = std::calloc(room, 1);
    if (base == nullptr) return nullptr;
    void* start = base;
    return {std::align(256, bytes, start, room), [base](void*) { std::free(base); }};
  }
  void upload(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void download(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void synchronize() override {}
  bool idle() override { return true; }
  int64_t chunk() const override { return 512; }
  int ahead() const override { return 0; }
  std::function<void()> record(const std::function<void()>& calls) override { return calls; }
};

// How much memory the processes of a control group may still take, if it has a limit.
std::optional<size_t> group_left(const std::string& group, const char* limit, const char* usage, const char* prefix) {
  const std::optional<size_t> most = read_number(group + limit);
  if (!most) return {};
  size_t taken = read_number(group + usage).value_or(0);
  for (const char* cached : {"inactive_file", "active_file"}) {
    const size_t files = read_number(group + "/memory.stat", std::string(prefix) + cached).value_or(0);
    taken -= std::min(taken, files);
  }
  return *most > taken ? *most - taken : 0;
}

}  // namespace

size_t memory_left(const std::string& root) {
  const auto available = read_number(root + "/proc/meminfo", "MemAvailable:");
  size_t left = available ? *available * 1024 : size_t(sysconf(_SC_AVPHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
  const std::string groups = root + "/sys/fs/cgroup";
  const auto take = [&](const std::optional<size_t>& bytes) { left = std::min(left, bytes.value_or(left)); };
  // The limits of the process's own group, from lines like "0::/a/b" (version 2) and "4:memory:/a/b" (version 1), and
  // of all its parents. In a container the path may be that of the outside; there the root group has the limits.
  std::ifstream own(root + "/proc/self/cgroup");
  std::string line = "0::/";
  do {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string which = line.substr(first + 1, second - first - 1);
    if (!which.empty() && which != "memory") continue;
    for (std::string path = line.substr(second + 1);; path.erase(path.rfind('/'))) {
      if (path == "/") path.clear();
      if (which.empty()) take(group_left(groups + path, "/memory.max", "/memory.current", ""));
      else take(group_left(groups + "/memory" + path, "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_"));
      if (path.empty() || path[0] != '/') break;
    }
  } while (std::getline(own, line));
  return left;
}

int count_cores(const std::vector<int>& cpus, const std::function<std::string(int cpu)>& siblings) {
  std::set<int> cores;
  for (const int cpu : cpus) {
    const int core = first_of(siblings(cpu), cpu);
    if (core < 0) return 0;
    cores.insert(core);
  }
  return int(cores.size());
}

// One thread for each core, because two on a core share its units, but no more than the CPUs and the quota of the
// process. If Linux does not say which CPUs share a core, one for each CPU.
int threads_of(int given) {
  if (given > 0) return given;
  const int most = kernels::cpu::Exec{}.threads();
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return most;
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
  }
  const int cores = count_cores(cpus, [](int cpu) {
    const std::string name = concat("/sys/devices/system/cpu/cpu", cpu, "/topology/thread_siblings_list");
    std::string list;
    std::getline(std::ifstream(name), list);
    return list;
  });
  return cores > 0 ? std::min(cores, most) : most;
}

std::unique_ptr<Device> make_cpu(int threads) { return std::make_unique<Cpu>(threads); }

std::string names_of(const std::function<bool(Type)>& has) {
  std::vector<std::string> names;
  for (int i = 0; i < kTypes; ++i) {
    if (has(Type(i))) names.push_back(name_of(Type(i)));
  }
  return names.empty() ? "none" : listed(names);
}

#if !LLM_GPU
std::unique_ptr<Device> make_gpu(Type, int, std::string& why) {
  why = "this program was built without CUDA";
  return nullptr;
}
#endif

}  // namespace llm
