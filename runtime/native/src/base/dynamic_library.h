// Loads third-party libraries at run time, when an engine needs them. The runtime is not linked
// with them.
#pragma once

#include <string>
#include <vector>

namespace dlm {

struct LibrarySearch {
  const char* what;      // name for messages: "ONNX Runtime"
  const char* variable;  // environment variable whose value is used if the caller gives no path
  std::vector<std::string> names;  // file names to try, in order
  const char* advice;              // what the user can do if the library is missing
};

// Opens the library at the path `given`. If `given` is empty, opens the path in the environment
// variable, or else the first of the names that loads. Sets *name to the path or name opened. The
// library is never closed, because such libraries run their own threads. Throws
// Error(DLM_ENGINE_MISSING).
void* open_library(const LibrarySearch& search, const std::string& given, std::string* name);

}  // namespace dlm
