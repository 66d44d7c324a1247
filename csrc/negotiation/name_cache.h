#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>

#include "negotiation/message.h"

namespace dadt {

// The requests to which rank 0 has given an id, at most one for each name: ranks report the short id instead
// of the whole request. Changes are sent to the ranks in a decision. Ids are never reused, since a rank may
// still use one that was removed.
class NameCache {
 public:
  NameCache() = default;
  NameCache(const NameCache&) = delete;
  NameCache& operator=(const NameCache&) = delete;

  // Returns the request with this id; null if there is none, or it was removed.
  std::shared_ptr<const Request> find(uint64_t id) const;
  // Returns the id of this request; 0 if its name has no id, or the id of another request.
  uint64_t id_of(const Request& request) const;

  // Marks the id as the most recently used one.
  void use(uint64_t id);
  // Gives the request a new id, in place of any earlier id of its name, and returns this id.
  uint64_t admit(std::shared_ptr<const Request> request, Decision& decision);
  // Removes the least recently used ids until `capacity` are left, but none whose name is pending.
  void trim(size_t capacity, const std::function<bool(const std::string& name)>& is_pending,
            Decision& decision);

 private:
  struct Cached {
    std::shared_ptr<const Request> request;
    std::list<uint64_t>::iterator age;
  };

  void evict(uint64_t id, Decision& decision);

  std::unordered_map<uint64_t, Cached> cached_;
  std::unordered_map<std::string, uint64_t> ids_;
  std::list<uint64_t> ages_;  // ids in the order of their last use
  uint64_t next_id_ = 1;
};

}  // namespace dadt
