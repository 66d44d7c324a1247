#include "engine.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "kernels/kernels.h"

namespace dadt {

struct EngineState {
  // Constant after construction.
  std::shared_ptr<Executor> executor;  // null: pull mode
  int rank = 0;
  int world_size = 1;
  double timeout = 0;

  // Any thread. Rung after each change of what mutex guards; the flags repeat it for those who sleep.
  Bell bell;
  std::atomic<bool> has_next{false};  // the queue is not empty
  std::atomic<bool> is_idle{true};    // nothing is queued or runs
  std::atomic<bool> has_error{false};
  std::atomic<bool> is_stopping{false};
  std::atomic<bool> is_closed{false};

  // Guarded by mutex.
  std::mutex mutex;
  std::deque<std::shared_ptr<Work>> queue;
  std::shared_ptr<Work> current;
  std::optional<Error> error;
  bool closing = false;

  // Whoever closes.
  std::thread thread;

  std::shared_ptr<Work> take();
  void settled(const Work& work);
  void fail(const Error& error);
  void run();
  void refresh() {
    has_next = !queue.empty();
    is_idle = queue.empty() && current == nullptr;
  }
};

// The next operation, which becomes the current one; null if there is none.
std::shared_ptr<Work> EngineState::take() {
  const std::lock_guard lock(mutex);
  if (queue.empty()) return nullptr;
  current = std::move(queue.front());
  queue.pop_front();
  refresh();
  return current;
}

void EngineState::settled(const Work& work) {
  {
    const std::lock_guard lock(mutex);
    if (current.get() == &work) current = nullptr;
    refresh();
  }
  bell.ring();
}

// Makes `reason` the sticky error, unless there is one, and fails what is pending. An operation that a C++
// executor is in is left to it: abort makes it return, and only then is the memory free.
void EngineState::fail(const Error& reason) {
  std::deque<std::shared_ptr<Work>> failed;
  Error first = reason;
  {
    const std::lock_guard lock(mutex);
    if (error) return;
    error = reason;
    has_error = true;
    failed.swap(queue);
    if (executor == nullptr && current != nullptr) failed.push_front(std::move(current));
    refresh();
  }
  for (const auto& work : failed) work->fail(first);
  if (executor != nullptr) executor->abort(first);
  bell.ring();
}

void EngineState::run() {
  while (true) {
    bell.wait([this] { return has_next || is_stopping; }, deadline_after(3600));
    const std::shared_ptr<Work> work = take();
    if (work == nullptr) {
      if (is_stopping) return;
      continue;
    }
    try {
      work->finish(executor->run(work->operation(), timeout));
    } catch (const Error& reason) {
      fail(reason);
    } catch (const std::exception& reason) {
      fail(Error(Code::kInternal, work->operation().title() + ": " + reason.what()));
    }
    if (!work->done()) {
      std::optional<Error> first;
      {
        const std::lock_guard lock(mutex);
        first = error;
      }
      work->fail(*first);
    }
    settled(*work);
  }
}

namespace {

void check(const Operation& operation, int world_size) {
  const std::string title = operation.title();
  if (!std::isfinite(operation.weight) || operation.weight < 0) {
    throw std::invalid_argument(title + ": the weight must be a number and not below 0");
  }
  if (operation.root < 0 || operation.root >= world_size) {
    throw std::invalid_argument(title + ": root " + std::to_string(operation.root) + " is no rank of " +
                                std::to_string(world_size));
  }
  const auto& counts = operation.layout.counts();
  if (operation.inputs.size() != counts.size() || operation.outputs.size() != counts.size()) {
    throw std::invalid_argument(title + ": the layout has " + std::to_string(counts.size()) +
                                " tensors, and so many addresses are needed");
  }
  if (operation.kind != Kind::kBroadcast) return;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] > 0 && operation.outputs[i] == nullptr) {
      throw std::invalid_argument(title + ": tensor " + std::to_string(i) + " has no address");
    }
  }
}

// Keeps the calling thread to this rank's share of the cores that the process may use. The ranks' threads
// wake at the same moment, work in step and sleep again, so briefly that the scheduler does not part two that
// it has put on one core; that took three times as long.
void share_cores(int rank, int world_size) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  const int cores = CPU_COUNT(&allowed);
  if (cores < world_size) return;
  cpu_set_t share;
  CPU_ZERO(&share);
  for (int core = 0, nth = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed)) continue;
    if (nth * world_size / cores == rank) CPU_SET(core, &share);
    ++nth;
  }
  sched_setaffinity(0, sizeof share, &share);
}

// A thread that no signal is delivered to: they are Python's main thread's.
std::thread start_thread(EngineState* state) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  try {
    thread = std::thread([state] {
      share_cores(state->rank, state->world_size);
      state->run();
    });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread.native_handle(), "dadt");
  return thread;
}

}  // namespace

Engine::Engine(std::shared_ptr<Executor> executor, int rank, int world_size, double timeout)
    : pid_(getpid()), state_(std::make_shared<EngineState>()) {
  check_rank(rank, world_size);
  if (!(timeout > 0)) throw std::invalid_argument("the timeout must be above 0 seconds");
  state_->executor = std::move(executor);
  state_->rank = rank;
  state_->world_size = world_size;
  state_->timeout = timeout;
  if (state_->executor != nullptr) state_->thread = start_thread(state_.get());
}

Engine::~Engine() {
  if (inert()) {
    // The thread does not exist here, and what it held may be half done: leave all of it alone.
    new std::shared_ptr<EngineState>(std::move(state_));
    return;
  }
  abort(Error(Code::kAborted, "the engine was destroyed before it was closed"));
  close(0);
}

bool Engine::inert() const { return getpid() != pid_; }

std::shared_ptr<Work> Engine::submit(Operation operation) {
  if (inert())
    throw std::runtime_error("the engine belongs to the parent process: a forked child cannot use it");
  check(operation, state_->world_size);
  auto work = std::make_shared<Work>(std::move(operation));
  std::optional<Error> error;
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->closing) throw std::runtime_error(work->operation().title() + ": the engine is closed");
    error = state_->error;
    if (!error) {
      state_->queue.push_back(work);
      state_->refresh();
    }
  }
  if (error) {
    work->fail(*error);
  } else {
    state_->bell.ring();
  }
  return work;
}

std::shared_ptr<Job> Engine::pull(double timeout) {
  if (inert())
    throw std::runtime_error("the engine belongs to the parent process: a forked child cannot use it");
  if (state_->executor != nullptr) throw std::runtime_error("the engine's own thread runs the operations");
  EngineState& state = *state_;
  {
    const std::lock_guard lock(state.mutex);
    if (state.current != nullptr) {
      throw std::runtime_error(state.current->operation().title() + " was pulled before and is not finished");
    }
  }
  state.bell.wait([&] { return state.has_next || state.is_closed; }, deadline_after(timeout));
  std::shared_ptr<Work> work = state.take();
  return work == nullptr ? nullptr : std::make_shared<Job>(state_, std::move(work));
}

void Engine::abort(const Error& error) {
  if (!inert()) state_->fail(error);
}

void Engine::close(double timeout) {
  if (inert()) return;
  EngineState& state = *state_;
  const auto deadline = deadline_after(timeout);
  bool first = false;
  {
    const std::lock_guard lock(state.mutex);
    first = !state.closing;
    state.closing = true;
  }
  if (!first) {  // another thread closes, or has
    state.bell.wait([&] { return state.is_closed.load(); }, deadline);
    return;
  }
  const auto settled = [&] { return state.is_idle || state.has_error; };
  while (!settled() && Clock::now() < deadline) state.bell.wait(settled, deadline);
  std::optional<Error> late;
  if (!settled()) {
    std::string title = "the last operation";
    {
      const std::lock_guard lock(state.mutex);
      if (state.current != nullptr) title = state.current->operation().title();
    }
    late = Error(Code::kTimeout, title + " was not done when the engine closed");
    state.fail(Error(Code::kAborted, late->what()));
  }
  state.is_stopping = true;
  state.bell.ring();
  if (state.thread.joinable()) state.thread.join();
  if (state.executor != nullptr) state.executor->close();
  state.is_closed = true;
  state.bell.ring();
  if (late) throw *late;
}

bool Engine::closed() const { return state_->is_closed; }

std::optional<Error> Engine::error() const {
  if (inert() || !state_->has_error) return std::nullopt;
  const std::lock_guard lock(state_->mutex);
  return state_->error;
}

Job::Job(std::shared_ptr<EngineState> state, std::shared_ptr<Work> work)
    : state_(std::move(state)), work_(std::move(work)), pid_(getpid()) {}

Job::~Job() {
  if (getpid() == pid_ && !work_->done())
    fail(Error(Code::kComm, operation().title() + " was dropped by the executor"));
}

void Job::check() const {
  if (work_->done()) throw Error(Code::kAborted, operation().title() + " has ended already");
}

void Job::pack(void* destination) const {
  check();
  const Operation& op = operation();
  const auto scale = kernels().scale[static_cast<int>(op.layout.dtype())];
  const size_t item = item_size(op.layout.dtype());
  uint8_t* to = static_cast<uint8_t*>(destination);
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    const size_t count = op.layout.counts()[i];
    if (op.inputs[i] == nullptr || op.weight == 0) {
      std::memset(to, 0, count * item);
    } else if (op.weight == 1) {
      std::memcpy(to, op.inputs[i], count * item);
    } else {
      scale(to, op.inputs[i], op.weight, count);
    }
    to += count * item;
  }
}

void Job::unpack(const void* source, double factor) const {
  check();
  const Operation& op = operation();
  const auto scale = kernels().scale[static_cast<int>(op.layout.dtype())];
  const size_t item = item_size(op.layout.dtype());
  const uint8_t* from = static_cast<const uint8_t*>(source);
  for (size_t i = 0; i < op.outputs.size(); ++i) {
    const size_t count = op.layout.counts()[i];
    if (op.outputs[i] != nullptr) {
      if (factor == 1) {
        std::memcpy(op.outputs[i], from, count * item);
      } else {
        scale(op.outputs[i], from, factor, count);
      }
    }
    from += count * item;
  }
}

void Job::finish(Result result) {
  if (!work_->finish(std::move(result))) check();
  state_->settled(*work_);
}

void Job::fail(const Error& error) {
  state_->fail(error);
  work_->fail(error);
  state_->settled(*work_);
}

}  // namespace dadt
