#include "engine/job.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "engine/engine_state.h"
#include "kernels/kernels.h"

namespace dadt {

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

size_t Job::place(size_t tensor) const {
  return static_cast<size_t>(static_cast<const uint8_t*>(operation().outputs[tensor]) -
                             static_cast<const uint8_t*>(operation().flat));
}

size_t Job::spread_count() const {
  const Operation& op = operation();
  if (op.flat == nullptr || op.outputs.empty()) return 0;
  return place(op.outputs.size() - 1) / item_size(op.layout.dtype()) + op.layout.counts().back();
}

bool Job::apart() const {
  const Operation& op = operation();
  const auto* const begin = static_cast<const uint8_t*>(op.flat);
  const auto* const end = begin + op.room * item_size(op.layout.dtype());
  return std::ranges::none_of(op.inputs, [&](const void* input) {
    return static_cast<const uint8_t*>(input) >= begin && static_cast<const uint8_t*>(input) < end;
  });
}

void Job::pack(void* destination, std::optional<double> given, bool spread) const {
  check();
  const Operation& op = operation();
  const double factor = given.value_or(op.weight);
  const auto scale = kernels().scale[static_cast<int>(op.layout.dtype())];
  const size_t item = item_size(op.layout.dtype());
  uint8_t* to = static_cast<uint8_t*>(destination);
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    const size_t count = op.layout.counts()[i];
    if (spread) to = static_cast<uint8_t*>(destination) + place(i);
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

void Job::unpack(const void* source, double factor, bool spread) const {
  check();
  marks_.exchanged = Clock::now();
  const Operation& op = operation();
  const auto scale = kernels().scale[static_cast<int>(op.layout.dtype())];
  const size_t item = item_size(op.layout.dtype());
  const uint8_t* from = static_cast<const uint8_t*>(source);
  for (size_t i = 0; i < op.outputs.size(); ++i) {
    const size_t count = op.layout.counts()[i];
    if (spread) from = static_cast<const uint8_t*>(source) + place(i);
    if (op.outputs[i] == nullptr) {
    } else if (factor != 1) {
      scale(op.outputs[i], from, factor, count);
    } else if (op.outputs[i] != from) {
      std::memcpy(op.outputs[i], from, count * item);
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
  record({.error = error});
  state_->fail(error);
  work_->fail(error);
  state_->settled(*work_);
}

}  // namespace dadt
