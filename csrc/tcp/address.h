#pragma once

#include <string>

namespace dadt {

// Returns the address of the other end of a socket as text; empty if it has none.
std::string address_of(int socket);

// Returns a rank with its address, such as "rank 2 (10.0.0.3)".
std::string ranked(int rank, const std::string& address);

}  // namespace dadt
