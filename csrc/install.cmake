# Compiles the libraries and installs what came of it: those that compiled, the output of one that did not, and
# _build.json, which says so. CMakeLists.txt sets `source`, `build`, and hf_kbit_cpu and hf_kbit_cuda to the files of
# the libraries that it found the means for; why it found none is in `build`/_build.json.

set(advice_cpu "another C++ compiler, named in CXX, or another torch")
set(advice_cuda "another CUDA toolkit, whose nvcc CUDACXX names, or another torch, or with HF_KBIT_CUDA_ARCHS=none")

string(ASCII 1 first_control)
string(ASCII 31 last_control)
get_filename_component(package "$ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}/hf_kbit" ABSOLUTE)
file(READ "${build}/_build.json" record)
foreach(half cpu cuda)
    set(log "_build_${half}.log")
    file(REMOVE "${package}/${log}")
    if(NOT hf_kbit_${half})
        continue()
    endif()
    # LC_ALL: in another language the first error would not be found below.
    execute_process(
        COMMAND "${CMAKE_COMMAND}" -E env LC_ALL=C "${CMAKE_COMMAND}" --build "${build}" --target hf_kbit_${half}
        OUTPUT_VARIABLE output ERROR_VARIABLE output ECHO_OUTPUT_VARIABLE ECHO_ERROR_VARIABLE RESULT_VARIABLE failed)
    if(NOT failed)
        file(INSTALL "${hf_kbit_${half}}" DESTINATION "${CMAKE_INSTALL_PREFIX}/hf_kbit" TYPE MODULE)
        continue()
    endif()

    file(WRITE "${package}/${log}" "${output}")
    # As g++, clang, ld and nvcc write it: "file:1:2: error: ...", "fatal error: ...", "nvcc fatal   : ...".
    string(REGEX MATCH "[^\r\n]*(error|fatal) *: [^\r\n]*" error "${output}")
    string(REPLACE "${source}/" "" error "${error}")
    if(NOT error)
        set(error "the first error is unknown")
    endif()
    set(missing "the ${half} library did not compile when hf_kbit was installed (${error}); install hf_kbit again with")
    string(APPEND missing " ${advice_${half}}")
    message(WARNING "hf_kbit: no ${half} library: ${missing}")
    string(REGEX REPLACE "([\"\\\\])" "\\\\\\1" missing "${missing}")
    # In JSON's strings there are no control characters, and CMake 4 refuses them.
    string(REPLACE "\t" "\\t" missing "${missing}")
    string(REGEX REPLACE "[${first_control}-${last_control}]" " " missing "${missing}")
    string(JSON record SET "${record}" ${half} missing "\"${missing}\"")
    string(JSON record SET "${record}" ${half} log "\"${log}\"")
endforeach()
# Written in place: file(INSTALL) takes files of the same second for the same.
file(WRITE "${package}/_build.json" "${record}\n")
