#include "engine/work.h"

#include <unistd.h>

namespace dadt {

Work::Work(Operation operation) : operation_(std::move(operation)), pid_(getpid()) {}

Work::~Work() { delete result_.load(); }

bool Work::wait(Clock::time_point deadline) {
  if (!done() && getpid() != pid_) throw std::runtime_error("this operation belongs to the parent process");
  return event_.wait([this] { return done(); }, deadline);
}

const Result& Work::result() const {
  const Result* result = result_.load();
  if (result == nullptr) throw std::runtime_error(operation_.title() + " is not done: call wait() first");
  return *result;
}

bool Work::finish(Result result) {
  auto mine = std::make_unique<const Result>(std::move(result));
  const Result* expected = nullptr;
  if (!result_.compare_exchange_strong(expected, mine.get())) return false;
  mine.release();
  event_.notify();
  return true;
}

bool Work::fail(const Error& error) { return finish({.error = error}); }

}  // namespace dadt
