#pragma once

#include <vector>

#include "engine/executor.h"
#include "tcp/collective.h"
#include "tcp/links.h"

namespace dadt {

// TCP between ranks, over sockets that somebody else has connected.
class TcpExecutor final : public Executor {
 public:
  // See Links.
  TcpExecutor(int rank, std::vector<int> data, std::vector<int> notices)
      : links_(rank, std::move(data), std::move(notices)) {}

  const char* name() const override { return "tcp"; }
  void settle_thread(int rank, int world_size) override;
  Result run(const Operation& operation, double timeout) override;
  void abort(const Error& error) override { links_.abort(error); }
  void close() override { links_.close(); }

 private:
  Links links_;

  // Engine thread only.
  CollectiveMemory memory_;
  uint32_t operations_ = 0;
};

}  // namespace dadt
