#include "engine/engine.h"

#include <sched.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <thread>

#include "base/thread.h"
#include "kernels/kernels.h"

namespace dadt {

struct EngineState {
  // Constant after construction.
  std::shared_ptr<Executor> executor;  // null: pull mode
  int rank = 0;
  int world_size = 1;
  double timeout = 0;

  // Any thread. Rung after each change of what mutex guards; the flags repeat it for those who sleep.
  EventCount event;
  std::atomic<bool> has_next{false};  // the queue's first may begin
  std::atomic<bool> is_idle{true};    // nothing is queued or runs
  std::atomic<bool> has_error{false};
  std::atomic<bool> is_stopping{false};
  std::atomic<bool> is_closed{false};
  std::atomic<Timeline*> timeline{nullptr};
  std::atomic<uint64_t> sent{0};
  std::atomic<uint64_t> plain{0};
  int track = 0;  // written before timeline

  // Guarded by mutex.
  std::mutex mutex;
  std::shared_ptr<Timeline> recorded;  // what `timeline` points to
  std::deque<std::shared_ptr<Work>> queue;
  std::set<const Work*> held;  // of the queue
  std::shared_ptr<Work> current;
  std::optional<Error> error;
  bool closing = false;

  // Whoever closes.
  std::thread thread;

  std::shared_ptr<Work> take();
  void settled(const Work& work);
  void fail(const Error& error);
  void count(const Result& result) {
    sent += result.sent;
    plain += result.plain;
  }
  void run();
  void run(Work& work);
  bool may_begin() const { return !queue.empty() && held.count(queue.front().get()) == 0; }
  void refresh() {
    has_next = may_begin();
    is_idle = queue.empty() && current == nullptr;
  }
};

// The next operation, which becomes the current one; null if there is none, or it is held.
std::shared_ptr<Work> EngineState::take() {
  const std::lock_guard lock(mutex);
  if (!may_begin()) return nullptr;
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
  event.notify();
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
    held.clear();
    if (executor == nullptr && current != nullptr) failed.push_front(std::move(current));
    refresh();
  }
  for (const auto& work : failed) work->fail(first);
  if (executor != nullptr) executor->abort(first);
  event.notify();
}

// One operation, on the executor.
void EngineState::run(Work& work) {
  Marks marks{.submitted = work.submitted(), .started = Clock::now()};
  Result result;
  try {
    result = executor->run(work.operation(), timeout);
  } catch (const Error& reason) {
    fail(reason);
    result.error = reason;
  } catch (const std::exception& reason) {
    result.error = Error(Code::kInternal, work.operation().title() + ": " + reason.what());
    fail(*result.error);
  }
  if (result.error) {  // the engine's first one counts
    const std::lock_guard lock(mutex);
    result.error = error;
  }
  if (Timeline* to = timeline) {
    marks.packed = result.packed;
    marks.done = Clock::now();
    to->operation(track, work.operation(), marks, result);
  }
  count(result);
  work.finish(std::move(result));
}

void EngineState::run() {
  while (true) {
    event.wait([this] { return has_next || is_stopping; }, deadline_after(3600));
    const std::shared_ptr<Work> work = take();
    if (work == nullptr) {
      if (is_stopping) return;
      continue;
    }
    run(*work);
    settled(*work);
  }
}

namespace {

template <typename Pointer>
void check_addresses(const std::string& title, const Layout& layout, const std::vector<Pointer>& addresses,
                     bool all) {
  const auto& counts = layout.counts();
  if (addresses.size() != counts.size()) {
    throw std::invalid_argument(title + ": the layout has " + std::to_string(counts.size()) +
                                " tensors, and so many addresses are needed");
  }
  for (size_t i = 0; all && i < counts.size(); ++i) {
    if (counts[i] > 0 && addresses[i] == nullptr) {
      throw std::invalid_argument(title + ": tensor " + std::to_string(i) + " has no address");
    }
  }
}

void check_operation(const Operation& operation, int world_size) {
  const std::string title = operation.title();
  if (!std::isfinite(operation.weight) || operation.weight < 0) {
    throw std::invalid_argument(title + ": the weight must be a number and not below 0");
  }
  if (operation.root < 0 || operation.root >= world_size) {
    throw std::invalid_argument(title + ": root " + std::to_string(operation.root) + " is no rank of " +
                                std::to_string(world_size));
  }
  if (operation.compression.codec != Codec::kNone) {
    const bool additive = operation.reduction == Reduction::kMean || operation.reduction == Reduction::kSum;
    if (!additive || !is_float(operation.layout.dtype())) {
      throw std::invalid_argument(title + ": only a mean or a sum of floats is compressed");
    }
  }
  const bool exchange = operation.kind == Kind::kExchange;
  check_addresses(title, operation.layout, operation.inputs, exchange);
  check_addresses(title, exchange ? operation.receives : operation.layout, operation.outputs,
                  exchange || operation.kind == Kind::kBroadcast);
  if (!exchange) return;
  const size_t ranks = static_cast<size_t>(world_size);
  if (operation.inputs.size() != ranks || (operation.outputs.size() != ranks && !operation.outputs.empty())) {
    throw std::invalid_argument(title + ": there are " + std::to_string(ranks) +
                                " ranks, and each is sent to and received from, be it nothing");
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

}  // namespace

Engine::Engine(std::shared_ptr<Executor> executor, int rank, int world_size, double timeout)
    : pid_(getpid()), state_(std::make_shared<EngineState>()) {
  check_rank(rank, world_size);
  if (!(timeout > 0)) throw std::invalid_argument("the timeout must be above 0 seconds");
  state_->executor = std::move(executor);
  state_->rank = rank;
  state_->world_size = world_size;
  state_->timeout = timeout;
  if (state_->executor == nullptr) return;
  state_->thread = start_thread("dadt", [state = state_.get()] {
    share_cores(state->rank, state->world_size);
    state->run();
  });
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

std::shared_ptr<Work> Engine::submit(Operation operation, bool held) {
  if (inert())
    throw std::runtime_error("the engine belongs to the parent process: a forked child cannot use it");
  check(operation);
  auto work = std::make_shared<Work>(std::move(operation));
  std::optional<Error> error;
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->closing) throw std::runtime_error(work->operation().title() + ": the engine is closed");
    error = state_->error;
    if (!error) {
      state_->queue.push_back(work);
      if (held) state_->held.insert(work.get());
      state_->refresh();
    }
  }
  if (error) {
    work->fail(*error);
  } else {
    state_->event.notify();
  }
  return work;
}

void Engine::release(Work& work) {
  if (inert()) return;
  {
    const std::lock_guard lock(state_->mutex);
    state_->held.erase(&work);
    state_->refresh();
  }
  state_->event.notify();
}

void Engine::check(const Operation& operation) const {
  check_operation(operation, state_->world_size);
  if (state_->executor != nullptr || operation.kind != Kind::kAllreduce) return;
  const std::string title = operation.title();
  const bool additive = operation.reduction == Reduction::kMean || operation.reduction == Reduction::kSum;
  if (operation.lane.empty() && operation.weight != 1 && operation.participants == 0) {
    throw std::invalid_argument(title + ": weights travel with a lane only");
  }
  if (!operation.lane.empty() && !additive) {
    throw std::invalid_argument(title + ": a lane travels with a mean or a sum only");
  }
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
  state.event.wait([&] { return state.has_next || state.is_closed; }, deadline_after(timeout));
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
    state.event.wait([&] { return state.is_closed.load(); }, deadline);
    return;
  }
  const auto settled = [&] { return state.is_idle || state.has_error; };
  while (!settled() && Clock::now() < deadline) state.event.wait(settled, deadline);
  std::optional<Error> late;
  if (!settled()) {
    std::string title = "the last operation";
    {
      const std::lock_guard lock(state.mutex);
      const auto& last =
          state.current != nullptr || state.queue.empty() ? state.current : state.queue.front();
      if (last != nullptr) title = last->operation().title();
    }
    late = Error(Code::kTimeout, title + " was not done when the engine closed");
    state.fail(Error(Code::kAborted, late->what()));
  }
  state.is_stopping = true;
  state.event.notify();
  if (state.thread.joinable()) state.thread.join();
  if (state.executor != nullptr) state.executor->close();
  state.is_closed = true;
  state.event.notify();
  if (late) throw *late;
}

bool Engine::closed() const { return state_->is_closed; }

std::optional<Error> Engine::error() const {
  if (inert() || !state_->has_error) return std::nullopt;
  const std::lock_guard lock(state_->mutex);
  return state_->error;
}

std::pair<uint64_t, uint64_t> Engine::sent() const { return {state_->sent, state_->plain}; }

void Engine::record(std::shared_ptr<Timeline> timeline, int track) {
  if (inert()) return;
  const std::lock_guard lock(state_->mutex);
  if (state_->recorded != nullptr) throw std::runtime_error("the engine is recorded already");
  state_->recorded = std::move(timeline);
  state_->track = track;
  state_->timeline = state_->recorded.get();
}

Timeline* Engine::timeline() const { return state_->timeline; }

Job::Job(std::shared_ptr<EngineState> state, std::shared_ptr<Work> work)
    : state_(std::move(state)), work_(std::move(work)), pid_(getpid()) {
  marks_.submitted = work_->submitted();
  marks_.started = Clock::now();
}

Job::~Job() {
  if (getpid() == pid_ && !work_->done())
    fail(Error(Code::kComm, operation().title() + " was dropped by the executor"));
}

void Job::check() const {
  if (work_->done()) throw Error(Code::kAborted, operation().title() + " has ended already");
}

void Job::pack(void* destination, std::optional<double> given) const {
  check();
  const Operation& op = operation();
  const double factor = given.value_or(op.weight);
  const auto scale = kernels().scale[static_cast<int>(op.layout.dtype())];
  const size_t item = item_size(op.layout.dtype());
  uint8_t* to = static_cast<uint8_t*>(destination);
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    const size_t count = op.layout.counts()[i];
    if (op.inputs[i] == nullptr || factor == 0) {
      std::memset(to, 0, count * item);
    } else if (factor == 1) {
      std::memcpy(to, op.inputs[i], count * item);
    } else {
      scale(to, op.inputs[i], factor, count);
    }
    to += count * item;
  }
  marks_.packed = Clock::now();
}

void Job::unpack(const void* source, double factor) const {
  check();
  marks_.exchanged = Clock::now();
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

void Job::compress(size_t begin, size_t end, void* wire) const {
  check();
  dadt::compress(operation(), begin, std::min(end, block_count(operation().layout.total())), wire);
  marks_.packed = Clock::now();
}

void Job::decompress(const Wires& wires) const {
  check();
  marks_.exchanged = Clock::now();
  dadt::decompress(operation(), 0, block_count(operation().layout.total()), wires);
}

std::vector<void*> Job::allocate(const std::vector<size_t>& bytes) {
  check();
  received_.clear();
  std::vector<void*> addresses;
  for (size_t count : bytes) addresses.push_back(received_.emplace_back(count).data.get());
  return addresses;
}

void Job::record(const Result& result) {
  Timeline* timeline = state_->timeline;
  if (timeline == nullptr) return;
  marks_.done = Clock::now();
  timeline->operation(state_->track, operation(), marks_, result);
}

void Job::finish(Result result) {
  result.received = std::move(received_);
  record(result);
  state_->count(result);
  if (!work_->finish(std::move(result))) check();
  state_->settled(*work_);
}

void Job::fail(const Error& error) {
  Result result;
  result.error = error;
  record(result);
  state_->fail(error);
  work_->fail(error);
  state_->settled(*work_);
}

}  // namespace dadt
