#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/work.h"

namespace dadt {

// A rank's request for a named tensor. It must be equal on all ranks, otherwise the tensor fails.
struct Request {
  std::string name;
  std::string signature;  // further properties that must be equal, as text for error messages
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

// A message in which a rank submits tensors to rank 0.
struct Report {
  uint64_t seen = 0;  // number of decisions that this rank has carried out
  int64_t step = 0;
  bool waits = false;   // whether a thread waits for a tensor that is not decided yet
  bool joined = false;  // whether this rank has joined, so that it submits no more
  std::vector<uint64_t> ids;
  std::vector<Request> requests;  // requests to which rank 0 has given no id yet
};

// One operation that all ranks must run.
struct Batch {
  std::vector<uint64_t> ids;
  // Ranks that have joined and contribute nothing. The fields below describe the operation to these ranks,
  // and are empty if there are no such ranks.
  std::vector<uint64_t> missing;
  std::string name;
  DType dtype = DType::kUInt8;
  Reduction reduction = Reduction::kMean;
  std::vector<size_t> counts;
};

// A message from rank 0 to all ranks, which carry out its parts in the order of these fields.
struct Decision {
  struct Admission {
    uint64_t id;
    std::string name;
  };
  struct Failure {
    Code code;
    std::string name;
    std::string text;
    // Ranks whose request has failed; other ranks' requests for the same name are not affected.
    std::vector<int> ranks;
  };

  uint64_t number = 0;
  std::vector<Admission> admitted;
  std::vector<Batch> batches;
  std::vector<Failure> failures;
  std::vector<uint64_t> evicted;
  int64_t last_joined = -1;  // the rank that joined last, once all have joined; before, -1
};

// The error because of which a rank ends the negotiation; it is sent to all ranks.
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
