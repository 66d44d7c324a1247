#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/work.h"

namespace dadt {

// A rank's request for a named tensor. It is the same on every rank, or the tensor fails.
struct Request {
  std::string name;
  std::string signature;  // whatever else must be equal, as users may read it
  std::string group;      // empty: none
  uint64_t group_size = 0;
  Kind kind = Kind::kAllreduce;
  // The fields of an allreduce; other operations leave them as they are here.
  DType dtype = DType::kUInt8;
  Reduction reduction = Reduction::kMean;
  std::vector<size_t> counts{};

  bool operator==(const Request&) const = default;
  size_t bytes() const;
};

// The name of an operation made of several tensors.
std::string fused_name(const std::string& first, size_t tensors);

// A message from a rank to rank 0.
struct Report {
  uint64_t seen = 0;  // decisions that this rank has followed
  int64_t step = 0;
  bool waits = false;   // somebody waits for a tensor that was undecided then
  bool joined = false;  // this rank submits no more
  std::vector<uint64_t> ids;
  std::vector<Request> requests;  // those that have no id
};

// One operation that all ranks are to run.
struct Batch {
  std::vector<uint64_t> ids;
  // Ranks that have joined and give nothing. The rest is for them, and empty where there are none.
  std::vector<uint64_t> missing;
  std::string name;
  DType dtype = DType::kUInt8;
  Reduction reduction = Reduction::kMean;
  std::vector<size_t> counts;
};

// A message from rank 0 to all ranks, to be followed in this order.
struct Decision {
  struct Admission {
    uint64_t id;
    std::string name;
  };
  struct Failure {
    Code code;
    std::string name;
    std::string text;
    std::vector<int> ranks;  // that have submitted what has failed; another's of that name goes on
  };

  uint64_t number = 0;
  std::vector<Admission> admitted;
  std::vector<Batch> batches;
  std::vector<Failure> failures;
  std::vector<uint64_t> evicted;
  int64_t last_joined = -1;  // all ranks have joined, this one as the last; -1: not all have
};

// Why a rank gives up. Sent to all.
struct GivingUp {
  int64_t rank = -1;  // whose decision it was; -1: the text says all
  Code code = Code::kAborted;
  std::string text;

  Error error() const;
};

enum class MessageType : uint8_t { kReport = 1, kDecision, kGivingUp, kGoodbye, kOrder };

// A message on its way: the length of the rest, a type, and the body.
std::string encode(const Report& report);
std::string encode(const Decision& decision);
std::string encode(const GivingUp& giving_up);
std::string encode(MessageType type, const std::string& text);

// A body's meaning. Throw Error(kComm) if it has none.
Report decode_report(const std::string& body);
Decision decode_decision(const std::string& body);
GivingUp decode_giving_up(const std::string& body);

}  // namespace dadt
