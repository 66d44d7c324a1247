#include "engine/engine.h"

#include <unistd.h>

#include <cmath>

#include "base/thread.h"
#include "engine/engine_state.h"

namespace dadt {

// Makes the next operation the current one and returns it; null if there is none, or the next one is still
// held (see Engine::submit).
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

// Makes `reason` the engine's permanent error, unless it already has one, and fails all pending operations.
// An operation in progress on a C++ executor fails later, when the executor's abort makes it return, since
// the executor uses the operation's memory until then.
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

// Runs one operation on the executor.
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
  if (result.error) {  // the engine's first error may be the cause of this one
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

void check_flat(const std::string& title, const Operation& operation) {
  if (operation.flat == nullptr) return;
  const size_t item = item_size(operation.layout.dtype());
  const uint8_t* at = static_cast<const uint8_t*>(operation.flat);
  const uint8_t* const end = at + operation.room * item;
  for (size_t i = 0; i < operation.outputs.size() && i < operation.layout.counts().size(); ++i) {
    const auto* const output = static_cast<const uint8_t*>(operation.outputs[i]);
    const size_t bytes = operation.layout.counts()[i] * item;
    if (bytes == 0) continue;  // an empty tensor has no address to check
    if (output < at || output > end || bytes > static_cast<size_t>(end - output)) {
      throw std::invalid_argument(title + ": output " + std::to_string(i) +
                                  " does not lie in the flat buffer, behind those before it");
    }
    at = output + bytes;
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
  check_flat(title, operation);
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
    state->executor->settle_thread(state->rank, state->world_size);
    state->run();
  });
}

Engine::~Engine() {
  if (inert()) {
    // The thread does not exist in a forked child, and may have been changing its data during the fork, so
    // the data is leaked instead of destroyed.
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
  if (!first) {  // another thread is closing the engine, or has closed it
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

}  // namespace dadt
