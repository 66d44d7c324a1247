#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/work.h"

namespace dadt {

// A rank's request for a named tensor. It must be the same on every rank, or the tensor fails.
struct Request {
  std::string name;
  std::string signature;  // other properties that must be equal, as text for users
  std::string group;      // name of the tensor's group; empty if the tensor has none
  uint64_t group_size = 0;
  Kind kind = Kind::kAllreduce;
  // Fields that only an allreduce sets; other operations leave them at these values.
  DType dtype = DType::kUInt8;
  Reduction reduction = Reduction::kMean;
  std::vector<size_t> counts{};

  bool operator==(const Request&) const = default;
  size_t bytes() const;
};

// Returns the name of an operation that combines several tensors.
std::string fused_name(const std::string& first, size_t tensors);

// A message from a rank to rank 0.
struct Report {
  uint64_t seen = 0;  // number of decisions that this rank has carried out
  int64_t step = 0;
  bool waits = false;   // whether a thread waits for a tensor that was undecided at that time
  bool joined = false;  // whether this rank submits no more
  std::vector<uint64_t> ids;
  std::vector<Request> requests;  // requests that have no id yet
};

// One operation that all ranks must run.
struct Batch {
  std::vector<uint64_t> ids;
  // Ranks that have joined and contribute nothing. The fields below are for these ranks, and empty if there
  // are none.
  std::vector<uint64_t> missing;
  std::string name;
  DType dtype = DType::kUInt8;
  Reduction reduction = Reduction::kMean;
  std::vector<size_t> counts;
};

// A message from rank 0 to all ranks; they carry out its parts in the order of these fields.
struct Decision {
  struct Admission {
    uint64_t id;
    std::string name;
  };
  struct Failure {
    Code code;
    std::string name;
    std::string text;
    // Ranks whose request has failed; requests of other ranks for the same name continue.
    std::vector<int> ranks;
  };

  uint64_t number = 0;
  std::vector<Admission> admitted;
  std::vector<Batch> batches;
  std::vector<Failure> failures;
  std::vector<uint64_t> evicted;
  int64_t last_joined = -1;  // the last rank to join, once all ranks have joined; else -1
};

// The reason why a rank gives up, sent to all ranks.
struct GivingUp {
  int64_t rank = -1;  // rank that gave up; -1 if the text names it already
  Code code = Code::kAborted;
  std::string text;

  Error error() const;
};

enum class MessageType : uint8_t { kReport = 1, kDecision, kGivingUp, kGoodbye, kOrder };

// Encode a message for sending: the length of the rest, a type, and the body.
std::string encode(const Report& report);
std::string encode(const Decision& decision);
std::string encode(const GivingUp& giving_up);
std::string encode(MessageType type, const std::string& text);

// Decode the body of a message. Throw Error(kComm) if it is invalid.
Report decode_report(const std::string& body);
Decision decode_decision(const std::string& body);
GivingUp decode_giving_up(const std::string& body);

}  // namespace dadt
