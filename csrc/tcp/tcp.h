#pragma once

#include <memory>
#include <vector>

#include "engine/executor.h"
#include "tcp/collective.h"
#include "tcp/links.h"

namespace dadt {

// An executor that uses TCP between ranks, over sockets that the caller has connected.
class TcpExecutor final : public Executor {
 public:
  // The parameters are those of Links.
  TcpExecutor(int rank, const std::vector<std::vector<int>>& sockets, double silence = 0)
      : links_(std::make_shared<Links>(rank, sockets, silence)),
        parts_(links_->world_size()),
        ways_(links_->world_size()) {}

  const char* name() const override { return "tcp"; }
  void settle_thread(int rank, int world_size) override;
  Result run(const Operation& operation, double timeout) override;
  void abort(const Error& error) override { links_->abort(error); }
  void close() override { links_->close(); }

  // Returns the kernel's counts for the connections with each rank; see Links::counts.
  std::vector<LinkCounts> counts() const { return links_->counts(); }
  const std::shared_ptr<Links>& links() const { return links_; }
  // Decides how large operations go; for the engine's thread, except for what any thread may call.
  Ways& ways() { return ways_; }

 private:
  const std::shared_ptr<Links> links_;

  // Only the engine's thread uses the following fields.
  CollectiveMemory memory_;
  Parts parts_;
  Ways ways_;
  uint32_t operations_ = 0;
};

}  // namespace dadt
