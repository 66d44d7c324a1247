#include "engine/head.h"

#include <cmath>
#include <cstring>
#include <sstream>

namespace dadt {
namespace {

bool is(const Head& head, Kind kind) { return head.kind == static_cast<uint32_t>(kind); }

// Returns whether the operation's data must have the same shape on all ranks.
bool is_uniform(const Head& head) { return is(head, Kind::kAllreduce) || is(head, Kind::kBroadcast); }

std::string describe(const Head& head) {
  std::ostringstream text;
  text << kind_name(static_cast<Kind>(head.kind)) << " \"" << head.name << "\"";
  if (is_uniform(head)) text << " of " << head.total << " " << dtype_name(static_cast<DType>(head.dtype));
  if (is(head, Kind::kBroadcast)) text << " from rank " << head.root;
  return text.str();
}

bool same(const Head& one, const Head& other) {
  if (one.kind != other.kind || one.name_hash != other.name_hash) return false;
  if (!is_uniform(one)) return true;
  return one.dtype == other.dtype && one.codec == other.codec && one.reduction == other.reduction &&
         one.root == other.root && one.total == other.total && one.layout == other.layout &&
         one.lane == other.lane;
}

}  // namespace

Head head_of(const Operation& operation, size_t total, size_t lane) {
  Head head{};
  head.kind = static_cast<uint32_t>(operation.kind);
  head.dtype = static_cast<uint32_t>(operation.layout.dtype());
  head.reduction = static_cast<uint32_t>(operation.reduction);
  head.codec = static_cast<uint32_t>(operation.compression.codec);
  head.total = total;
  head.layout = operation.layout.hash();
  head.lane = lane;
  head.weight = operation.weight;
  head.root = operation.root;
  head.name_hash = std::hash<std::string>()(operation.name);
  std::strncpy(head.name, operation.name.c_str(), sizeof head.name - 1);
  return head;
}

bool is_sound(const Head& head) {
  return head.kind < kKinds && head.dtype < kDTypes && head.reduction < kReductions && head.codec < kCodecs &&
         std::isfinite(head.weight) && head.weight >= 0 && head.name[sizeof head.name - 1] == '\0';
}

std::string difference(int rank, const Head& one, int peer, const Head& other) {
  if (same(one, other)) return {};
  std::string a = describe(one);
  std::string b = describe(other);
  if (a != b) {
    // The two descriptions already differ, so nothing is added.
  } else if (one.reduction != other.reduction) {
    a += std::string(" by ") + reduction_name(static_cast<Reduction>(one.reduction));
    b += std::string(" by ") + reduction_name(static_cast<Reduction>(other.reduction));
  } else if (one.codec != other.codec) {
    a += std::string(" as ") + codec_name(static_cast<Codec>(one.codec));
    b += std::string(" as ") + codec_name(static_cast<Codec>(other.codec));
  } else if (one.layout != other.layout) {
    a += " in tensors of one division";
    b += " in tensors of another";
  } else if (one.lane != other.lane) {
    a += " with a lane of " + std::to_string(one.lane) + " bytes";
    b += " with one of " + std::to_string(other.lane);
  } else {
    b += " with another end of its long name";
  }
  return "rank " + std::to_string(rank) + " is in " + a + ", rank " + std::to_string(peer) + " in " + b +
         ": the ranks do not run the same steps";
}

Shares::Shares(const Operation& operation, std::vector<double> all) : weights(std::move(all)) {
  bool equal = true;
  for (double weight : weights) {
    sum += weight;
    equal = equal && weight == weights[0];
  }
  for (size_t rank = 0; rank < weights.size(); ++rank) {
    if (equal || weights[rank] > 0) ranks.push_back(static_cast<int>(rank));
  }
  divisor = equal ? static_cast<double>(weights.size()) : sum;
  // If all ranks have the same weight, a mean needs no weights; a sum needs them unless the weight is 0 or 1,
  // since 0 counts as 1.
  const bool plain = operation.reduction != Reduction::kSum || weights[0] == 0 || weights[0] == 1;
  if (equal && plain) {
    weights.clear();
  } else {
    std::erase(weights, 0.0);
  }
}

}  // namespace dadt
