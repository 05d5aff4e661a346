"""The schema, as numbered steps. The one table of table names is the SQL below.

A request moves so, and never back:

    (submit refused) ───────────────► failed, rejected = 1    its seq_id is used up
    (submit accepted) ──► pending ──┬► done      a row in `results`
                                    └► failed    error and category
    done ──► trimmed                   result dropped: acknowledged, or its session long over

A model:      creating ──► ready ──┬► unloaded   asked for, or its session ended
                  └────► failed    └► lost       it could not be restored after a restart
A session:    open ──► finished | expired
A sequence:   (its request is pending, cancelled or failed: no row) ──► recorded ──► expired: no row

What a training request does to its model stands in `effect`: 1 adds to the gradient of its window
(and spoils it when it failed), 2 is a step, 0 changes nothing that a replay has to repeat. `gaps`
are ids that a lane gave up on. A snapshot covers all of its model's requests up to its seq_id, so
their bodies go when its row comes. `pins` keep sequences for requests that may be run (again).

Bodies, results and the arrays of a sequence stand in tables of their own, so that changing a state
or an expiry never rewrites a blob, and dropping one never touches its row.
"""

from __future__ import annotations

MIGRATIONS: tuple[tuple[int, str], ...] = (
    (
        1,
        """
        CREATE TABLE sessions (
            session_id      TEXT PRIMARY KEY,
            owner           TEXT NOT NULL,
            idempotency_key TEXT,
            tags            TEXT NOT NULL,
            user_metadata   TEXT NOT NULL,
            sdk_version     TEXT NOT NULL,
            project_id      TEXT,
            display_name    TEXT,
            created_at      REAL NOT NULL,
            heartbeat_at    REAL NOT NULL,
            state           TEXT NOT NULL DEFAULT 'open',
            reason          TEXT,
            detail          TEXT,
            ended_at        REAL,
            settled         INTEGER NOT NULL DEFAULT 0
        ) WITHOUT ROWID;
        CREATE UNIQUE INDEX sessions_idempotency ON sessions (owner, idempotency_key)
            WHERE idempotency_key IS NOT NULL;
        CREATE INDEX sessions_state ON sessions (state, settled);

        CREATE TABLE models (
            model_id        TEXT PRIMARY KEY,
            session_id      TEXT NOT NULL,
            owner           TEXT NOT NULL,
            base_model      TEXT NOT NULL,
            rank            INTEGER NOT NULL,
            seed            TEXT,
            train_attn      INTEGER NOT NULL,
            train_mlp       INTEGER NOT NULL,
            train_unembed   INTEGER NOT NULL,
            optimizer       TEXT NOT NULL,
            user_metadata   TEXT NOT NULL,
            state           TEXT NOT NULL,
            why             TEXT,
            created_at      REAL NOT NULL
        ) WITHOUT ROWID;
        CREATE INDEX models_session ON models (session_id);
        CREATE INDEX models_state ON models (state);

        CREATE TABLE samplers (
            sampler_id      TEXT PRIMARY KEY,
            session_id      TEXT NOT NULL,
            owner           TEXT NOT NULL,
            base_model      TEXT NOT NULL,
            model_path      TEXT,
            target          TEXT NOT NULL,
            joined          INTEGER NOT NULL DEFAULT 0,
            created_at      REAL NOT NULL
        ) WITHOUT ROWID;
        CREATE INDEX samplers_session ON samplers (session_id);

        CREATE TABLE weights (
            version         TEXT PRIMARY KEY,
            model_id        TEXT NOT NULL,
            base_model      TEXT NOT NULL,
            folder          TEXT,
            step            INTEGER NOT NULL,
            ephemeral       INTEGER NOT NULL,
            created_at      REAL NOT NULL,
            expires_at      REAL,
            user_metadata   TEXT NOT NULL
        ) WITHOUT ROWID;
        CREATE INDEX weights_model ON weights (model_id, created_at);

        CREATE TABLE targets (
            target          TEXT PRIMARY KEY,
            version         TEXT NOT NULL
        ) WITHOUT ROWID;

        CREATE TABLE checkpoints (
            path            TEXT PRIMARY KEY,
            kind            TEXT NOT NULL,
            owner           TEXT NOT NULL,
            model_id        TEXT NOT NULL,
            base_model      TEXT NOT NULL,
            rank            INTEGER NOT NULL,
            seed            TEXT,
            train_attn      INTEGER NOT NULL,
            train_mlp       INTEGER NOT NULL,
            train_unembed   INTEGER NOT NULL,
            optimizer       TEXT NOT NULL,
            folder          TEXT NOT NULL,
            version         TEXT,
            size_bytes      INTEGER NOT NULL,
            step            INTEGER NOT NULL,
            contents        TEXT NOT NULL,
            ttl_seconds     INTEGER,
            created_at      REAL NOT NULL,
            expires_at      REAL,
            user_metadata   TEXT NOT NULL
        ) WITHOUT ROWID;
        CREATE INDEX checkpoints_model ON checkpoints (model_id, created_at);
        CREATE INDEX checkpoints_expiry ON checkpoints (expires_at) WHERE expires_at IS NOT NULL;

        CREATE TABLE requests (
            request_id      TEXT PRIMARY KEY,
            kind            TEXT NOT NULL,
            owner           TEXT NOT NULL,
            session_id      TEXT NOT NULL,
            key             TEXT NOT NULL,
            seq_id          INTEGER NOT NULL,
            clone           INTEGER NOT NULL DEFAULT 0,
            samples         INTEGER NOT NULL DEFAULT 0,
            digest          BLOB NOT NULL,
            seed            TEXT,
            state           TEXT NOT NULL,
            rejected        INTEGER NOT NULL DEFAULT 0,
            error           TEXT,
            category        TEXT,
            content_type    TEXT,
            size            INTEGER NOT NULL DEFAULT 0,
            cursor          INTEGER,
            created_at      REAL NOT NULL,
            finished_at     REAL
        );
        CREATE INDEX requests_pending ON requests (state) WHERE state = 'pending';
        CREATE INDEX requests_session ON requests (session_id, state);
        CREATE INDEX requests_cursor ON requests (key, clone, cursor) WHERE cursor IS NOT NULL;

        CREATE TABLE bodies (
            request_id      TEXT PRIMARY KEY,
            key             TEXT NOT NULL,
            seq_id          INTEGER NOT NULL,
            size            INTEGER NOT NULL,
            body            BLOB NOT NULL
        );
        CREATE INDEX bodies_key ON bodies (key, seq_id, size);

        CREATE TABLE results (
            request_id      TEXT PRIMARY KEY,
            body            BLOB NOT NULL
        );

        CREATE TABLE prompts (
            request_id      TEXT PRIMARY KEY,
            tokens          BLOB NOT NULL
        );

        CREATE TABLE sequences (
            sequence_id     TEXT PRIMARY KEY,
            request_id      TEXT NOT NULL,
            session_id      TEXT NOT NULL,
            idx             INTEGER NOT NULL,
            length          INTEGER NOT NULL,
            temperature     REAL NOT NULL,
            versions        TEXT NOT NULL,
            head_k          INTEGER,
            finished_at     REAL NOT NULL,
            expires_at      REAL NOT NULL
        );
        CREATE INDEX sequences_expiry ON sequences (expires_at);
        CREATE INDEX sequences_request ON sequences (request_id);

        CREATE TABLE arrays (
            sequence_id     TEXT PRIMARY KEY,
            tokens          BLOB NOT NULL,
            logprobs        BLOB,
            head_ids        BLOB,
            head_logprobs   BLOB
        );
        """,
    ),
    (
        2,
        """
        ALTER TABLE requests ADD COLUMN effect INTEGER NOT NULL DEFAULT 0;
        UPDATE requests SET effect = CASE kind WHEN 'forward_backward' THEN 1
            WHEN 'optim_step' THEN 2 ELSE 0 END;
        CREATE INDEX requests_order ON requests (key, seq_id) WHERE kind != 'sample';

        ALTER TABLE models ADD COLUMN saved TEXT;

        CREATE TABLE gaps (
            model_id        TEXT NOT NULL,
            first           INTEGER NOT NULL,
            after           INTEGER NOT NULL,
            missed          TEXT NOT NULL,
            PRIMARY KEY (model_id, first)
        ) WITHOUT ROWID;

        CREATE TABLE snapshots (
            model_id        TEXT PRIMARY KEY,
            seq_id          INTEGER NOT NULL,
            folder          TEXT NOT NULL,
            form            TEXT NOT NULL,
            contents        TEXT NOT NULL,
            failed          TEXT NOT NULL,
            created_at      REAL NOT NULL
        ) WITHOUT ROWID;

        CREATE TABLE pins (
            sequence_id     TEXT NOT NULL,
            request_id      TEXT NOT NULL,
            PRIMARY KEY (sequence_id, request_id)
        ) WITHOUT ROWID;
        CREATE INDEX pins_request ON pins (request_id);
        """,
    ),
    (
        3,
        """
        ALTER TABLE checkpoints ADD COLUMN public INTEGER NOT NULL DEFAULT 0;
        CREATE INDEX checkpoints_owner ON checkpoints (owner, created_at);
        CREATE INDEX models_owner ON models (owner, created_at);
        CREATE INDEX sessions_owner ON sessions (owner, created_at);

        CREATE TABLE copies (
            owner           TEXT NOT NULL,
            idempotency_key TEXT NOT NULL,
            path            TEXT NOT NULL,
            PRIMARY KEY (owner, idempotency_key)
        ) WITHOUT ROWID;

        CREATE TABLE usage (
            hour            INTEGER NOT NULL,
            owner           TEXT NOT NULL,
            session_id      TEXT NOT NULL,
            base_model      TEXT NOT NULL,
            kind            TEXT NOT NULL,
            amount          INTEGER NOT NULL,
            PRIMARY KEY (owner, hour, session_id, base_model, kind)
        ) WITHOUT ROWID;

        CREATE TABLE audit (
            at              REAL NOT NULL,
            owner           TEXT NOT NULL,
            event           TEXT NOT NULL,
            path            TEXT NOT NULL,
            details         TEXT NOT NULL
        );
        CREATE INDEX audit_owner ON audit (owner, at);
        """,
    ),
    (
        4,
        """
        CREATE TABLE custom_losses (
            loss_id         TEXT PRIMARY KEY,
            session_id      TEXT NOT NULL,
            body            BLOB NOT NULL
        );
        CREATE INDEX custom_losses_session ON custom_losses (session_id);
        """,
    ),
)
