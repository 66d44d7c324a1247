#pragma once

#include <gtest/gtest.h>

#include <barrier>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "shm/shm.h"

namespace dadt {

// A third of the cases under ThreadSanitizer: what threads do to each other does not depend on their values.
template <class Case>
std::vector<Case> thinned(std::vector<Case> cases) {
#ifdef __SANITIZE_THREAD__
  size_t number = 0;
  std::erase_if(cases, [&](const Case&) { return number++ % 3 != 0; });
#endif
  return cases;
}

// Runs body(rank) on one thread per rank, and rethrows the first failure of the lowest rank.
inline void spawn(int world_size, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> errors(world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// Connected shm executors, one per rank.
inline std::vector<std::shared_ptr<ShmExecutor>> connected(int world_size, size_t slot_bytes) {
  std::vector<std::shared_ptr<ShmExecutor>> executors;
  std::vector<std::string> endpoints;
  for (int rank = 0; rank < world_size; ++rank) {
    executors.push_back(std::make_shared<ShmExecutor>(rank, world_size, slot_bytes));
    endpoints.push_back(executors.back()->endpoint());
  }
  spawn(world_size, [&](int rank) { executors[rank]->connect(endpoints, 30); });
  return executors;
}

template <typename T>
Operation allreduce(DType dtype, std::vector<std::vector<T>>& tensors, std::vector<std::vector<T>>& outputs,
                    std::string name = "test") {
  Operation operation;
  operation.name = std::move(name);
  std::vector<size_t> counts;
  for (size_t i = 0; i < tensors.size(); ++i) {
    counts.push_back(tensors[i].size());
    operation.inputs.push_back(tensors[i].data());
    operation.outputs.push_back(outputs[i].data());
  }
  operation.layout = Layout(dtype, counts);
  return operation;
}

inline Operation allgather(std::string data, std::string name = "test") {
  Operation operation;
  operation.kind = Kind::kAllgather;
  operation.name = std::move(name);
  operation.lane = std::move(data);
  return operation;
}

// The Error that body throws.
template <typename Body>
Error caught(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  return Error(Code::kInternal, "nothing was thrown");
}

}  // namespace dadt
