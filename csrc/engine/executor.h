#pragma once

#include <string>
#include <vector>

#include "engine/work.h"

namespace dadt {

// Moves bytes between ranks. Life: construct, endpoint, connect (one thread), then run and close (the
// engine's thread) and abort (any thread). A destructor in a forked child touches nothing.
class Executor {
 public:
  virtual ~Executor() = default;

  virtual const char* name() const = 0;

  // The endpoint by which peers reach this rank; empty if it needs none, as it does not connect to them, or
  // was connected before. Does not block.
  virtual std::string endpoint() { return {}; }

  // All ranks' endpoints, by rank. Blocks until every rank has connected; Error(kTimeout) names those that
  // have not.
  virtual void connect(const std::vector<std::string>&, double /*timeout*/) {}

  // Called once on the engine's thread, before the first operation.
  virtual void settle_thread(int rank, int world_size);

  // Runs one operation, blocking; no wait for a peer is longer than `timeout` seconds. Throws Error; after
  // that the executor is good for abort and close only.
  virtual Result run(const Operation& operation, double timeout) = 0;

  // Makes a running `run` here and on the peers throw `error`, now; peers that arrive later, too. Never
  // blocks.
  virtual void abort(const Error& error) = 0;

  // Tells the peers that this rank has come to its orderly end. Idempotent.
  virtual void close() = 0;
};

// Runs an operation on a rank that is alone; the null executor does so on each of `world_size`.
Result run_alone(const Operation& operation, int world_size);

// What to say of a peer that has died, or has closed though it lives. who: as in "rank 2 (pid 7)". title:
// what it was waited for in.
Error lost_error(const std::string& who, bool lives, const std::string& title);

// What to say of ranks that have not come to it in time.
Error late_error(const std::vector<int>& ranks, const std::string& title, double timeout);

// Throws std::invalid_argument unless 0 <= rank < world_size.
void check_rank(int rank, int world_size);

}  // namespace dadt
