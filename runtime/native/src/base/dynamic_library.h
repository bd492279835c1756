// Loads third-party libraries when an engine needs them. They are never linked.
#pragma once

#include <string>
#include <vector>

namespace dlm {

struct LibrarySearch {
  const char* what;                // name for messages: "ONNX Runtime"
  const char* variable;            // environment variable with a path; used if no path is given
  std::vector<std::string> names;  // names to try, in order
  const char* advice;              // what to do if it is missing
};

// Opens the path `given`, or the variable's path, or the first of the names that loads. Sets *name
// to the one opened. Never closes it, because such libraries have threads. Throws
// Error(DLM_ENGINE_MISSING).
void* open_library(const LibrarySearch& search, const std::string& given, std::string* name);

}  // namespace dlm
