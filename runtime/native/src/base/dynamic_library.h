// Loads third-party libraries at run time. The runtime does not link to these libraries, so a
// missing library matters only to the engine that needs it.
#pragma once

#include <string>
#include <vector>

namespace dlm {

struct LibrarySearch {
  const char* what;  // the library's name in messages, for example "ONNX Runtime"
  // The name of the environment variable that contains the path of the library. The variable is
  // used only if the caller gives no path.
  const char* variable;
  std::vector<std::string> names;  // file names to try, in this order
  const char* advice;              // what the user can do if the library is missing
};

// Opens a library and returns its handle. If `given` is not empty, opens the library at this path.
// Otherwise, if the environment variable contains a path, opens the library at that path. Otherwise
// tries the file names in order until a library can be opened. Sets *name to the path or file name
// of the opened library. The runtime never closes the library, because the library may still run
// threads. Throws an Error with status DLM_ENGINE_MISSING if no library can be opened.
void* open_library(const LibrarySearch& search, const std::string& given, std::string* name);

}  // namespace dlm
