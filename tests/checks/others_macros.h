// What other headers define, for a file that includes them before those of the library. Those that stand for something
// stand for what the others mean; any use of the rest is an error.

// windows.h
#define min(a, b) (((a) < (b)) ? (a) : (b))
#define max(a, b) (((a) > (b)) ? (a) : (b))
#define near
#define far
#define small char
#define hyper long long
#define interface struct
#define ERROR 0
#define NO_ERROR 0L
#define DELETE (0x00010000L)
#define IN
#define OUT
#define OPTIONAL
#define CONST const
#define VOID void
#define TRUE 1
#define FALSE 0
#define STRICT 1
#define IGNORE 0
#define INFINITE 0xFFFFFFFF
#define ABSOLUTE 1
#define RELATIVE 2
#define OPAQUE 2
#define TRANSPARENT 1
#define THIS void
#define CALLBACK __stdcall
#define PASCAL __stdcall
#define NEAR
#define FAR

// complex.h
#define I (__extension__ 1.0iF)
#define complex _Complex
#define imaginary _Imaginary

// sys/sysmacros.h
#define major(device) not_for_this_library(device)
#define minor(device) not_for_this_library(device)
#define makedev(a, b) not_for_this_library(a, b)

// Qt
#define signals public
#define slots
#define emit
#define forever for (;;)
#define foreach(variable, container) for (variable : container)

// glog, PyTorch, Catch2
#define CHECK(condition) not_for_this_library(condition)
#define DCHECK(condition) not_for_this_library(condition)
#define CHECK_EQ(a, b) not_for_this_library(a, b)
#define LOG(severity) not_for_this_library(severity)
#define VLOG(level) not_for_this_library(level)
#define INFO(message) not_for_this_library(message)
#define WARN(message) not_for_this_library(message)
#define FAIL(message) not_for_this_library(message)
#define REQUIRE(condition) not_for_this_library(condition)
#define SECTION(name) not_for_this_library(name)
#define UNUSED(x) not_for_this_library(x)
#define likely(x) not_for_this_library(x)
#define unlikely(x) not_for_this_library(x)
