// The program around one kernel: reads a job from standard input, runs the grid, writes the outcome to standard output.
// The two layouts are those of fa2gen/emulator/runner.py.
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <thread>

#include "block.h"

namespace emulator {
namespace {

constexpr uint32_t kMagic = 0x32414632;

class Reader {
 public:
  void bytes(void* to, size_t size) {
    if (size && std::fread(to, 1, size, stdin) != size) throw Diagnostic("protocol", "the job ends early");
  }
  template <class T>
  T value() {
    T v;
    bytes(&v, sizeof v);
    return v;
  }
};

struct Job {
  Options options;
  unsigned os_threads, num_threads, shared_bytes;
  Dim3 grid;
  std::vector<uint64_t> params;  // 8-byte words, so that it is aligned as the kernel's struct
  GlobalMemory memory;
};

void read_buffer(Reader& in, GlobalBuffer& buffer) {
  buffer.name.resize(in.value<uint32_t>());
  in.bytes(&buffer.name[0], buffer.name.size());
  buffer.pointer_index = in.value<int32_t>();
  buffer.map_index = in.value<int32_t>();
  buffer.writable = in.value<uint32_t>();
  buffer.output = in.value<uint32_t>();
  const bool has_mask = in.value<uint32_t>();
  buffer.keeps_state = in.value<uint32_t>();
  buffer.start = in.value<uint64_t>();
  buffer.allocate(in.value<uint64_t>());
  const size_t elements = buffer.flags.size();
  std::vector<uint8_t> mask(elements, 1), initialised(elements, !buffer.output), data(buffer.bytes);
  if (has_mask) in.bytes(mask.data(), elements);
  if (buffer.keeps_state) in.bytes(initialised.data(), elements);
  in.bytes(data.data(), data.size());
  for (size_t i = 0; i < elements; i++) {
    if (!mask[i]) continue;
    buffer.flags[i] = GlobalBuffer::kInView | (initialised[i] ? GlobalBuffer::kInitialised : 0);
    if (initialised[i]) std::memcpy(buffer.data + 2 * i, &data[2 * i], std::min<size_t>(2, buffer.bytes - 2 * i));
  }
}

void read_job(Job& job) {
  Reader in;
  if (in.value<uint32_t>() != kMagic) throw Diagnostic("protocol", "standard input holds no job");
  job.options.seed = in.value<uint64_t>();
  job.options.random_schedule = in.value<uint32_t>();
  job.options.lazy_wgmma = in.value<uint32_t>();
  job.options.checks = in.value<uint32_t>();
  job.os_threads = in.value<uint32_t>();
  job.grid.x = in.value<uint32_t>(), job.grid.y = in.value<uint32_t>(), job.grid.z = in.value<uint32_t>();
  job.num_threads = in.value<uint32_t>();
  job.shared_bytes = in.value<uint32_t>();
  const unsigned params_bytes = in.value<uint32_t>();
  const unsigned num_buffers = in.value<uint32_t>();
  job.params.resize((params_bytes + 7) / 8);
  in.bytes(job.params.data(), params_bytes);
  if (params_bytes != emulator_params_bytes)
    throw Diagnostic("params-size", format("the launch gives %u bytes of parameters, the kernel's struct has %u",
                                           params_bytes, emulator_params_bytes));
  job.memory.buffers.resize(num_buffers);
  for (GlobalBuffer& buffer : job.memory.buffers) {
    read_buffer(in, buffer);
    for (const int word : {buffer.pointer_index, buffer.map_index})
      if (word >= 0) job.params.at(word) = reinterpret_cast<uintptr_t>(buffer.data) + buffer.start;
  }
}

// A crash says which thread was running; the signal then takes its course.
void on_crash(int signal, siginfo_t* info, void*) {
  static char text[512];
  const Block* block = Block::running;
  int length = 0;
  if (block) {
    const int overflowed = block->stacks().overflowed(info->si_addr);
    length = std::snprintf(text, sizeof text, "%s%s", block->where(block->current->tid).c_str(),
                           overflowed >= 0 ? ": the thread's stack overflowed\n" : "\n");
  }
  if (length > 0 && write(STDERR_FILENO, text, size_t(length)) < 0) _exit(3);
  ::signal(signal, SIG_DFL);
  raise(signal);
}

// Fibers' stacks may be full when a crash is handled, so handlers run on a stack of their own.
void handle_crashes() {
  static thread_local char stack[64 * 1024];
  stack_t alternate{};
  alternate.ss_sp = stack, alternate.ss_size = sizeof stack;
  sigaltstack(&alternate, nullptr);
  struct sigaction action{};
  action.sa_sigaction = on_crash;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(signal, &action, nullptr);
}

// Runs every block; throws the diagnostic of the lowest-numbered block that failed.
Counters launch(Job& job) {
  const unsigned total = job.grid.x * job.grid.y * job.grid.z;
  const unsigned workers = std::max(1u, std::min(job.os_threads, total));
  std::atomic<unsigned> next{0};
  std::atomic<bool> stop{false};
  std::vector<std::unique_ptr<Diagnostic>> failures(total);
  std::vector<Counters> counters(workers);
  Grid grid(job.memory, workers);
  auto work = [&](unsigned me) {
    handle_crashes();
    Block block(job.num_threads, job.shared_bytes, grid, job.options);
    current_grid = job.grid;
    for (unsigned i; !stop && (i = next++) < total;) {
      try {
        block.run({i % job.grid.x, i / job.grid.x % job.grid.y, i / job.grid.x / job.grid.y}, i, job.params.data());
      } catch (const Diagnostic& d) {
        if (!d.name.empty()) failures[i] = std::make_unique<Diagnostic>(d);  // else it gave up because of another one
        stop = true;
        grid.semaphores.stop();
      }
    }
    grid.semaphores.leave();
    counters[me] = block.counters;
  };
  std::vector<std::thread> others;
  for (unsigned t = 1; t < workers; t++) others.emplace_back(work, t);
  work(0);
  for (std::thread& t : others) t.join();
  for (const auto& failure : failures)
    if (failure) throw *failure;
  if (job.options.checks) grid.tickets.finish();
  grid.additions.finish(grid.semaphores.in_use(), job.options.seed);
  Counters sum;
  for (const Counters& c : counters) sum.add(c);
  return sum;
}

void write_text(const std::string& text) {
  const uint32_t size = uint32_t(text.size());
  std::fwrite(&size, sizeof size, 1, stdout);
  std::fwrite(text.data(), 1, text.size(), stdout);
}

int run() {
  Job job;
  Counters counters;
  std::string name, text;
  try {
    read_job(job);
    counters = launch(job);
  } catch (const Diagnostic& d) {
    name = d.name, text = d.what();
  }
  std::fwrite(&kMagic, sizeof kMagic, 1, stdout);
  write_text(name);
  write_text(text);
  std::fwrite(&counters, sizeof counters, 1, stdout);
  if (name.empty())
    for (const GlobalBuffer& buffer : job.memory.buffers) {
      if (buffer.writable) std::fwrite(buffer.data, 1, buffer.bytes, stdout);
      if (!buffer.output && !buffer.keeps_state) continue;
      for (uint8_t flags : buffer.flags) std::putchar((flags & GlobalBuffer::kInitialised) != 0);
    }
  return std::fflush(stdout) == 0 ? 0 : 2;
}

}  // namespace
}  // namespace emulator

int main() {
  // A kernel that never ends would outlive a caller that is killed.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  return emulator::run();
}
